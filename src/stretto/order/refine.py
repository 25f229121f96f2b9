"""Orders of windows for the whole step: heads and tails of each window from simulations, the best kept.

A window by itself knows nothing of other ranks: when messages arrive, and how urgent those are that it sends.
Both depend on all windows together, so they are searched for, with the simulated step as the measure:

    1. Every window in its order with no arrivals and no tails; simulate. From there the search (`order.search`)
       goes on, with these moves:
    2. What the simulation shows (`order.observed`): each window ordered again with that, all at once and
       one by one.
    3. Then each arrival and each tail by itself, as a part of the window's work (GRID). With shared network
       cards it may pay that messages go later than they could, and no window by itself shows this.
    4. 2 and 3 again until nothing is gained, or as many steps have been simulated as are allowed.

May touch `stretto.ir`, `stretto.simulate` and this room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import PlanError
from stretto.ir.plan import InstructionKind, Plan, Window
from stretto.ir.timeline import Timeline
from stretto.order import NOTHING, Arranger, Outside, Role
from stretto.order.observed import observe
from stretto.order.search import GAIN, Budget, Point, Scope, Search
from stretto.order.walk import Chosen
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

Build = Callable[[Mapping[str, Window]], Plan]
"""The plan with these windows."""


@dataclass(frozen=True, slots=True)
class Refined:
    """The best windows found, and the step that they take."""

    step_us: float
    windows: Mapping[str, Window]


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
    scope = _Windows(build, captured, quick)
    knobs = [knob for name, window in captured.items() for knob in _knobs(plan, quick, name, window)]
    search = Search(scope, Budget(allowed))
    if not knobs or not search.tried(search.point):
        return None

    def move(search: Search) -> Iterator[Point]:
        yield from _seen(search, scope)
        yield from _each(search, scope, knobs)

    before_us = float("inf")
    while search.measure_us < (1.0 - GAIN) * before_us:
        before_us = search.measure_us
        search.go(move, 1, allowed)
    return Refined(search.measure_us, scope.windows(search.point.outside))


class _Windows(Scope):
    """A step whose windows run many times, each with what its runs see of other ranks. made: the plan and its
    timeline of the last walk."""

    def __init__(self, build: Build, captured: Mapping[str, Window], quick: Arranger) -> None:
        super().__init__((), 0.0, 0.0)
        self.quick = quick
        self.known: dict[tuple[object, ...], tuple[Plan, Timeline] | None] = {}
        """By windows in their orders."""
        self._build = build
        self._captured = captured

    def windows(self, outside: Mapping[str, Outside]) -> dict[str, Window]:
        """Ordered with that."""
        return {
            name: self.quick.arrange(window, outside.get(name, NOTHING))
            for name, window in self._captured.items()
        }

    def new(self, outside: Mapping[str, Outside]) -> Iterator[Point]:
        """The point, if it has not been walked."""
        if _key(self.windows(outside)) not in self.known:
            yield Point(outside=outside)

    def walk(self, point: Point, most_us: float = float("inf")) -> Chosen | None:
        windows = self.windows(point.outside)
        plan = self._build(windows)
        self.known[_key(windows)] = None
        try:
            timeline = simulate(plan)
        except PlanError:
            return None
        self.known[_key(windows)] = plan, timeline
        # What gains little is not worth that windows are ordered anew.
        return Chosen(timeline.step_us, (), 0.0) if timeline.step_us < (1.0 - GAIN) * most_us else None


def _key(windows: Mapping[str, Window]) -> tuple[object, ...]:
    return tuple(window.items for window in windows.values())


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


def _seen(search: Search, scope: _Windows) -> Iterator[Point]:
    """Step 2."""
    made = scope.known[_key(scope.windows(search.point.outside))]
    assert made is not None
    found = observe(*made, scope.quick)
    yield from scope.new({**search.point.outside, **found})
    for name, outside in found.items():
        yield from scope.new({**search.point.outside, name: outside})


def _each(search: Search, scope: _Windows, knobs: Sequence[_Knob]) -> Iterator[Point]:
    """Step 3."""
    for knob in knobs:
        now = search.point.outside.get(knob.window, NOTHING)
        for part in GRID:
            changed = {**(now.tails if knob.sends else now.arrivals), knob.key: part * knob.work_us}
            new = Outside(now.arrivals, changed) if knob.sends else Outside(changed, now.tails)
            yield from scope.new({**search.point.outside, knob.window: new})
