"""Orders of windows for the whole step: heads and tails of each window, searched with the simulated step.

A window by itself knows nothing of other ranks: when messages arrive, and how urgent those are that it sends.
Both depend on all windows together, so they are searched for, with the simulated step as the measure:

    1. Every window in its order with no arrivals and no tails; simulate. From there the search
       (`order.search`) goes on:
    2. Each arrival and each tail by itself, as a part of the window's work (GRID). With shared network
       cards it may pay that messages go later than they could, and no window by itself shows this.
    3. 2 again until nothing is gained, or as many steps have been simulated as are allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stretto.errors import PlanError
from stretto.ir.plan import Plan, Window
from stretto.order import NOTHING, Arranger, Outside, Role
from stretto.order.search import GAIN, Budget, Point, Scope, Search
from stretto.order.walk import Chosen
from stretto.passes.watch import Watch
from stretto.simulating import simulate

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

Build = Callable[[Mapping[str, Window]], Plan]
"""The plan with these windows."""


@dataclass(frozen=True, slots=True)
class Refined:
    """The best windows found, and the step that they take."""

    step_us: float
    windows: Mapping[str, Window]


def refine(
    build: Build,
    captured: Mapping[str, Window],
    quick: Arranger,
    share: float = 1.0,
    watch: Watch | None = None,
) -> Refined | None:
    """The windows with the shortest step that the search finds.

    captured: by name, in the captured order. quick: orders what is tried; ROUNDS are enough. share: of WORK,
    what the step is worth. watch: is told how far it is; at an interrupt that it takes, the best so far
    counts. None where there is nothing to search: no messages between ranks, or steps too long to be
    simulated often.
    """
    plan = build(captured)
    items = (len(window.items) for rank in range(plan.ranks) for _, _, window in plan.runs(rank))
    watch = watch or Watch()
    allowed = min(MOST, int(share * WORK) // max(1, sum(items)))
    if plan.ranks == 1 or allowed < FEWEST:
        return None
    scope = _Windows(build, captured, quick)
    knobs = [knob for name, window in captured.items() for knob in _knobs(plan, quick, name, window)]
    search = Search(scope, Budget(allowed, watch, of=f" for {plan.schedule.microbatches} microbatches"))
    if not knobs or not scope.new({}) or not search.tried(search.point):
        return None

    before_us = float("inf")
    try:
        while search.measure_us < (1.0 - GAIN) * before_us:
            before_us = search.measure_us
            search.go(partial(_each, scope, knobs), 1, allowed)
    except KeyboardInterrupt as error:
        watch.stop(error)
    return Refined(search.measure_us, scope.windows(search.point.outside))


class _Windows(Scope):
    """A step whose windows run many times, each with what its runs see of other ranks."""

    def __init__(self, build: Build, captured: Mapping[str, Window], quick: Arranger) -> None:
        super().__init__((), 0.0, 0.0)
        self._build = build
        self._captured = captured
        self._quick = quick
        self._known: set[tuple[object, ...]] = set()

    def windows(self, outside: Mapping[str, Outside]) -> dict[str, Window]:
        """Ordered with that."""
        return {
            name: self._quick.arrange(window, outside.get(name, NOTHING))
            for name, window in self._captured.items()
        }

    def new(self, outside: Mapping[str, Outside]) -> bool:
        """Whether windows get orders that no walk had."""
        key = tuple(window.items for window in self.windows(outside).values())
        known = key in self._known
        self._known.add(key)
        return not known

    def walk(self, point: Point, most_us: float = float("inf")) -> Chosen | None:
        try:
            step_us = simulate(self._build(self.windows(point.outside))).step_us
        except PlanError:
            return None
        # What gains nothing is not worth that windows are ordered anew.
        return Chosen(step_us, (), 0.0) if step_us < most_us else None


@dataclass(frozen=True, slots=True)
class _Knob:
    """A message of a window: its arrival, or its tail."""

    window: str
    sends: bool
    key: tuple[int, int]
    work_us: float


def _knobs(plan: Plan, quick: Arranger, name: str, window: Window) -> Iterator[_Knob]:
    graph = quick.graph(window)
    for node in graph.nodes:
        if node.role in (Role.SEND, Role.RECEIVE):
            ends = plan.job.edges[int(node.item.ref)]
            if plan.rank_of(ends.source) != plan.rank_of(ends.target):
                key = node.item.part, int(node.item.ref)
                yield _Knob(name, node.role is Role.SEND, key, graph.work_us)


def _each(scope: _Windows, knobs: Sequence[_Knob], search: Search) -> Iterator[Point]:
    """Step 2: what has not been tried."""
    for knob in knobs:
        now = search.point.outside.get(knob.window, NOTHING)
        for part in GRID:
            changed = {**(now.tails if knob.sends else now.arrivals), knob.key: part * knob.work_us}
            new = Outside(now.arrivals, changed) if knob.sends else Outside(changed, now.tails)
            outside = {**search.point.outside, knob.window: new}
            if scope.new(outside):
                yield Point(outside=outside)
