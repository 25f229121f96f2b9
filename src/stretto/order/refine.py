"""Orders of windows for the whole step: heads and tails of each window from simulations, the best kept.

A window by itself knows nothing of other ranks: when messages arrive, and how urgent those are that it sends.
Both depend on all windows together, so they are searched for, with the simulated step as the measure:

    1. Every window in its order with no arrivals and no tails; simulate.
    2. What the simulation shows (`order.observed`): each window ordered again with that, all at once and
       one by one. What makes the step shorter is kept.
    3. Then each arrival and each tail by itself, as a part of the window's work (GRID). With shared network
       cards it may pay that messages go later than they could, and no window by itself shows this.
    4. 2 and 3 again until nothing is gained, or as many steps have been simulated as are allowed.

Simulations are counted, not timed, so equal jobs get equal plans on every machine. May touch `stretto.ir`,
`stretto.schedule` and `stretto.simulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stretto.errors import PlanError
from stretto.ir.plan import InstructionKind, Plan, Window
from stretto.ir.timeline import Timeline
from stretto.order import NOTHING, Arranger, Outside, Role
from stretto.order.observed import observe
from stretto.simulate import simulate

GRID = (0.0, 0.3, 0.6, 0.9, 1.3)
"""Arrivals and tails that are tried, in parts of a window's work. Assumed."""

MOST = 100
"""Simulated steps for one candidate. Measured on GPTs over pp=2 tp=2: another 50 gain 1 %."""

WORK = 2_000_000
"""Simulated steps times items that all ranks run in one: longer steps are simulated less often. Assumed."""

FEWEST = 20
"""Where fewer simulations than this are allowed, the search is not worth its while. Assumed."""

ROUNDS = 10
"""Rounds of local search for an order that is tried: more serve a window, and not the step. Assumed."""

GAIN = 0.0005
"""Share of a step that counts as a gain. Assumed."""

Build = Callable[[Mapping[str, Window]], Plan]
"""The plan with these windows."""


@dataclass(frozen=True, slots=True)
class Refined:
    """The best windows found, and the step that they take."""

    step_us: float
    windows: Mapping[str, Window]


@dataclass(frozen=True, slots=True)
class _Knob:
    """A message of a window: its arrival, or its tail."""

    window: str
    sends: bool
    key: tuple[int, int]
    work_us: float


def refine(build: Build, captured: Mapping[str, Window], quick: Arranger) -> Refined | None:
    """The windows with the shortest step that the search finds.

    captured: by name, in the captured order. quick: orders what is tried; ROUNDS are enough.
    None where there is nothing to search: no messages between ranks, or steps too long to be simulated often.
    """
    plan = build(captured)
    items = (
        len(plan.windows[str(i.ref)].items)
        for order in plan.orders
        for i in order
        if i.kind is InstructionKind.RUN
    )
    allowed = min(MOST, WORK // max(1, sum(items)))
    if plan.ranks == 1 or allowed < FEWEST:
        return None
    search = _Search(build, captured, quick, plan, allowed)
    if not search.knobs or not search.begin():
        return None
    while search.seen() | search.each() and search.left():
        pass
    return Refined(search.best_us, search.windows)


class _Search:
    def __init__(
        self, build: Build, captured: Mapping[str, Window], quick: Arranger, plan: Plan, allowed: int
    ) -> None:
        self._build = build
        self._captured = captured
        self._quick = quick
        self._outside: dict[str, Outside] = {}
        self._known: dict[tuple[object, ...], float] = {}
        self.windows = {name: quick.arrange(window) for name, window in captured.items()}
        self._plan = plan
        self._allowed = allowed
        self._timeline: Timeline | None = None
        self.best_us = float("inf")
        self.knobs = [knob for name, window in captured.items() for knob in self._knobs(name, window)]

    def _knobs(self, name: str, window: Window) -> list[_Knob]:
        graph = self._quick.graph(window)
        return [
            _Knob(name, node.role is Role.SEND, (node.item.part, int(node.item.ref)), graph.work_us)
            for node in graph.nodes
            if node.role in (Role.SEND, Role.RECEIVE) and self._travels(int(node.item.ref))
        ]

    def _travels(self, edge: int) -> bool:
        ends = self._plan.job.edges[edge]
        return self._plan.rank_of(ends.source) != self._plan.rank_of(ends.target)

    def left(self) -> bool:
        """Whether more steps may be simulated."""
        return len(self._known) < self._allowed

    def begin(self) -> bool:
        """Step 1; False for a plan whose ranks wait for each other."""
        return self._try(self.windows, self._outside)

    def seen(self) -> bool:
        """Step 2. Whether anything was gained, as in the steps that follow."""
        assert self._timeline is not None
        found = observe(self._plan, self._timeline, self._quick)
        gained = self._arranged({**self._outside, **found})
        for name, outside in found.items():
            gained |= self._arranged({**self._outside, name: outside})
        return gained

    def each(self) -> bool:
        """Step 3."""
        gained = False
        for knob in self.knobs:
            now = self._outside.get(knob.window, NOTHING)
            for part in GRID:
                changed = {**(now.tails if knob.sends else now.arrivals), knob.key: part * knob.work_us}
                new = Outside(now.arrivals, changed) if knob.sends else Outside(changed, now.tails)
                gained |= self._arranged({**self._outside, knob.window: new})
        return gained

    def _arranged(self, outside: Mapping[str, Outside]) -> bool:
        """Try these heads and tails."""
        if not self.left():
            return False
        windows = {
            name: self.windows[name]
            if outside.get(name, NOTHING) == self._outside.get(name, NOTHING)
            else self._quick.arrange(window, outside.get(name, NOTHING))
            for name, window in self._captured.items()
        }
        return self._try(windows, outside)

    def _try(self, windows: Mapping[str, Window], outside: Mapping[str, Outside]) -> bool:
        """Simulate the step with these windows, and keep them when it gets shorter."""
        key = tuple(window.items for window in windows.values())
        if key in self._known:
            return False
        plan = self._build(windows)
        try:
            timeline = simulate(plan)
        except PlanError:
            self._known[key] = float("inf")
            return False
        self._known[key] = timeline.step_us
        if timeline.step_us >= self.best_us * (1.0 - GAIN):
            return False
        self.best_us, self._plan, self._timeline = timeline.step_us, plan, timeline
        self.windows, self._outside = dict(windows), dict(outside)
        return True
