"""The windows of a plan, put in order: windows that differ in names alone share one order.

Also here are the baseline's windows, in which nothing hides a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.costs import Costs
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import WAIT, Job
from stretto.order.depend import make_graph
from stretto.order.policies import DEFAULT, legal_order
from stretto.order.window import improve_order


class WindowOrders:
    """Orders windows, and remembers the orders of those that it has seen."""

    def __init__(
        self,
        job: Job,
        costs: Costs,
        stage_ranks: Sequence[int],
        policy: str = DEFAULT,
        share: float = 1.0,
    ) -> None:
        """policy: a name of `stretto.order.policies`. share: of the search for an order, what a window is
        worth. The costs are those of every window."""
        self._job = job
        self._costs = costs
        self._stage_ranks = stage_ranks
        self._policy = policy
        self._share = share
        self._orders: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._windows: dict[str, Window] = {}

    def ordered(self, window: Window) -> Window:
        """The window in the policy's order; as it is when nothing in it communicates over an axis.

        Raises UsageError for a policy that is unknown or gives an illegal order.
        """
        if window.name not in self._windows:
            self._windows[window.name] = self._ordered(window)
        return self._windows[window.name]

    def _ordered(self, window: Window) -> Window:
        graph = make_graph(self._job, self._costs, window, self._stage_ranks)
        if not graph.communicates:
            return window
        key = graph.key()
        if key not in self._orders:
            improves = self._policy == DEFAULT
            self._orders[key] = (
                improve_order(graph, share=self._share) if improves else legal_order(self._policy, graph)
            )
        return replace(window, items=tuple(graph.nodes[index].item for index in self._orders[key]))


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
