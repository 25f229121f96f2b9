"""The windows of a plan, put in order: each kind once, and with what their runs see of other ranks.

Windows that differ in names alone share one order. A window by itself knows nothing of other ranks: when
messages arrive, and how urgent those are that it sends. `for_the_step` tries some of both with the simulated
step as its measure. Also here are the baseline's windows, in which nothing hides a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from stretto.errors import PlanError
from stretto.ir.costs import Costs
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.ir.program import WAIT, Job
from stretto.order.depend import ALONE, Outside, Role, WindowGraph, make_graph
from stretto.order.policies import DEFAULT, legal_order
from stretto.order.window import improve_order
from stretto.passes.watch import Watch
from stretto.simulate import simulate

PARTS = (0.0, 0.6, 1.3)
"""Arrivals and tails that are tried, in parts of a window's work. Assumed."""

SIMULATED_ITEMS = 100_000
"""Items that the ranks run in a step, at most, for which windows are ordered for the step: longer ones are
not simulated so often. Assumed."""

WALKS = 10
"""Walks of the search for an order that is tried: more serve a window, and not the step. Assumed."""

MESSAGES = (Role.SEND, Role.RECEIVE)


class Arranger:
    """Orders windows, and remembers the orders of those that it has seen."""

    def __init__(
        self,
        job: Job,
        costs: Costs,
        stage_ranks: Sequence[int],
        policy: str = DEFAULT,
        walks: int | None = None,
        share: float = 1.0,
    ) -> None:
        """policy: a name of `stretto.order.policies`. walks: instead of it, local search with so many walks.
        share: of the search for an order, what a window is worth. The costs are those of every window."""
        self._job = job
        self._costs = costs
        self._stage_ranks = stage_ranks
        self._policy = policy
        self._walks = walks
        self._share = share
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._windows: dict[tuple[str, Outside], Window] = {}
        self._graphs: dict[str, tuple[WindowGraph, int]] = {}
        self._kinds: dict[tuple[object, ...], int] = {}

    def arrange(self, window: Window, outside: Outside = ALONE) -> Window:
        """The window in the policy's order; as it is when nothing in it communicates over an axis.

        outside: what its runs see of other ranks. Raises UsageError for a policy that is unknown or gives an
        illegal order.
        """
        key = window.name, outside
        if key not in self._windows:
            self._windows[key] = self._arranged(window, outside)
        return self._windows[key]

    def graph(self, window: Window) -> WindowGraph:
        """The graph that the policy takes, which knows nothing of other ranks."""
        return self._known(window)[0]

    def _known(self, window: Window) -> tuple[WindowGraph, int]:
        """The graph, and its kind: equal for those that differ in names alone."""
        known = self._graphs.get(window.name)
        if known is None:
            graph = make_graph(self._job, self._costs, window, self._stage_ranks)
            kinds = self._kinds
            known = graph, kinds.setdefault(graph.key(), len(kinds)) if graph.communicates else -1
            if self._walks is not None:  # it comes again, with other arrivals and tails
                self._graphs[window.name] = known
        return known

    def _arranged(self, window: Window, outside: Outside) -> Window:
        alone, kind = self._known(window)
        if not alone.communicates:
            return window
        graph = alone.seen(outside)
        key = kind, *((node.time_us, node.tail_us) for node in graph.nodes if node.role in MESSAGES)
        order = self._orders.get(key)
        if order is None:
            if self._walks is not None:
                order = improve_order(graph, walks=self._walks)
            elif self._policy == DEFAULT:
                order = improve_order(graph, share=self._share)
            else:
                order = legal_order(self._policy, graph)
            self._orders[key] = order
        return replace(window, items=tuple(graph.nodes[index].item for index in order))


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The best windows for a step, and the step that they take."""

    step_us: float
    windows: Mapping[str, Window]


def for_the_step(
    build: Callable[[Mapping[str, Window]], Plan],
    captured: Mapping[str, Window],
    arranger: Arranger,
    watch: Watch,
) -> StepWindows | None:
    """The windows with the shortest step, of those that PARTS give.

    build: the plan with these windows. captured: by name, in the captured order. arranger: orders what is
    tried; WALKS are enough. watch: at an interrupt that it takes, the best so far counts. None where there is
    nothing to try: one rank, or a step that is too long to be simulated often.
    """
    plan = build(captured)
    items = sum(len(window.items) for rank in range(plan.ranks) for _, _, window in plan.runs(rank))
    if plan.ranks == 1 or items > SIMULATED_ITEMS:
        return None
    best: StepWindows | None = None
    seen: set[object] = set()
    try:
        for arrival, tail in product(PARTS, PARTS):
            windows = {name: arranger.arrange(one, Outside(arrival, tail)) for name, one in captured.items()}
            key = tuple(window.items for window in windows.values())
            if key in seen:
                continue
            seen.add(key)
            try:
                step_us = simulate(build(windows)).step_us
            except PlanError:
                continue
            if best is None or step_us < best.step_us:
                best = StepWindows(step_us, windows)
    except KeyboardInterrupt as error:
        if best is None:
            raise
        watch.stop(error)
    return best


def waits_at_once(job: Job, window: Window) -> Window:
    """The window in its captured order, but every collective is waited for directly after its start."""
    ops = [
        {op.name: op for sub in phase.parts for op in job.stages[stage].ops[sub]}
        for stage, phase in window.parts
    ]
    waits: dict[tuple[int, str], Item] = {}
    for item in window.items:
        if item.kind is ItemKind.OP and ops[item.part][str(item.ref)].target == WAIT:
            waits[item.part, ops[item.part][str(item.ref)].uses[0]] = item
    here = {(item.part, str(item.ref)) for item in window.items if item.kind is ItemKind.OP}
    moved = {item for key, item in waits.items() if key in here}
    items: list[Item] = []
    for item in window.items:
        if item in moved:
            continue
        items.append(item)
        wait = waits.get((item.part, str(item.ref))) if item.kind is ItemKind.OP else None
        if wait is not None:
            items.append(wait)
    return replace(window, items=tuple(_sends_behind(job, items)))


def _sends_behind(job: Job, items: Sequence[Item]) -> list[Item]:
    """The items with every send directly after the item that makes what it sends."""
    sends: dict[tuple[int, str], list[Item]] = {}
    for item in items:
        if item.kind is ItemKind.SEND:
            sends.setdefault((item.part, job.edges[int(item.ref)].value), []).append(item)
    behind: list[Item] = []
    for item in items:
        if item.kind is ItemKind.SEND:
            continue
        behind.append(item)
        if item.kind is ItemKind.OP:
            behind += sends.get((item.part, str(item.ref)), ())
    return behind
