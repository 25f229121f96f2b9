"""The one local search for orders: neighbours of a point are walked, and the best is kept.

    1. A point describes how a scope is walked: by urgencies (`order.list_scheduler`), or in given orders
       (`order.walk`). A scope is a window by itself, or a step in which each rank has one window; there is no
       other difference between the two.
    2. From the best point so far, moves make others: `new_urgencies`, and forward-backward improvement
       (`order.forward_backward`).
    3. A point is kept unless what is ordered takes longer. Of equal ones the one with less memory is.
    4. The search ends where the order is close to what no order can beat, where nothing was gained for a
       while, and where its budget of walks is spent.

Walks are counted, not timed, and draws have a fixed seed, so equal jobs get equal plans on every machine. A
walk is given up as soon as it is known to be longer than the best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stretto.ir.plan import Plan
from stretto.order.list_scheduler import ListScheduler
from stretto.order.rank_window import RankWindow
from stretto.order.resources import StepResources, WindowResources
from stretto.order.walk import GivenOrder, LaneWalk, WalkResult, walk
from stretto.passes.step import Watch

T = TypeVar("T")

GAIN = 0.0005
"""Share of what is ordered that counts as a gain. Assumed."""

PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
"""Patience of a rank that moves try, in parts of a collective's time. Assumed."""


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """By rank: how urgent nodes are, and the patience of `order.list_scheduler`; or, instead of these, the
    order of its nodes, all or those that are placed by themselves."""

    urgency: tuple[Sequence[float], ...] = ()
    patience: tuple[float, ...] = ()
    orders: tuple[Sequence[int], ...] = ()


@dataclass(frozen=True)
class SearchScope:
    """What is ordered: by rank, a window. enough_us: an order that takes no more need not be improved.
    change_us: by how much urgencies are changed. plan: of the step; None for a window by itself.
    limit_bytes: the most memory of a rank above that at its begin, if that is counted.
    """

    windows: tuple[RankWindow, ...]
    enough_us: float
    change_us: float
    plan: Plan | None = None
    limit_bytes: int | None = None

    def walk(self, point: SearchPoint, most_us: float = float("inf")) -> WalkResult | None:
        """None when ranks wait forever, or one takes longer than most_us."""
        graph = self.windows[0].graph
        resources = WindowResources(graph) if self.plan is None else StepResources(self.plan)
        ranks: list[LaneWalk] = []
        for rank, window in enumerate(self.windows):
            memory = None if self.limit_bytes is None else window.memory.empty()
            if point.orders:
                ranks.append(GivenOrder(resources, rank, window, point.orders[rank], memory))
            else:
                rules = point.urgency[rank], point.patience[rank], memory, self.limit_bytes or 0
                ranks.append(ListScheduler(resources, rank, window, *rules))
        return walk(resources, ranks, most_us)

    @property
    def groups(self) -> list[tuple[int, list[int]]]:
        """(rank, nodes) of what changes together (`RankWindow.stretches`)."""
        return [(rank, group) for rank, window in enumerate(self.windows) for group in window.stretches]


class WalkBudget:
    """left: walks that may be made; spent: those that were. best: of all searches that share the budget, with
    its scope. watch: takes lines of progress; bound_us: what no order beats, where that is known; of: which
    step it is, in words for those lines."""

    def __init__(self, left: int, watch: Watch | None = None, bound_us: float = 0.0, of: str = "") -> None:
        self.left = self.allowed = left
        self.spent = 0
        self.best: tuple[SearchScope, WalkResult] | None = None
        self.bound_us = bound_us
        self._of = of
        self._watch = watch or Watch()

    def spend(self) -> None:
        """A walk is made."""
        self.spent += 1
        self.left = max(0, self.left - 1)
        if self.best is not None:
            self._watch.still(self._progress)

    def keep_best(self, scope: SearchScope, result: WalkResult) -> None:
        """A search has come to this."""
        if self.best is None or result.measure_us <= self.best[1].measure_us:
            self.best = scope, result

    def _progress(self) -> str:
        assert self.best is not None
        best_us = self.best[1].step_us
        of_bound = f", {best_us / self.bound_us:.3f} of the bound" if self.bound_us else ""
        best = f"best {best_us / 1000:.1f} ms{self._of}{of_bound}"
        return f"{self.spent} of at most {self.allowed} orders walked, {best}"

    def set_aside(self, part: float) -> int:
        """Take a part away, for later; how much it is."""
        aside = int(part * self.left)
        self.left -= aside
        return aside

    def shared(self, many: Sequence[T]) -> Iterator[T]:
        """Each when its turn comes, with an equal share; what one leaves goes to those behind it."""
        for at, one in enumerate(many):
            behind = len(many) - 1 - at
            aside = self.set_aside(behind / (behind + 1))
            yield one
            self.left += aside


class OrderSearch:
    """A search that has come to a point. best: its walk, None where no point was walked to its end; groups:
    as in `SearchScope`; stale: walks since the last gain."""

    best: WalkResult | None = None
    stale = 0
    _mark_us = float("inf")

    def __init__(self, scope: SearchScope, budget: WalkBudget, point: SearchPoint = SearchPoint()) -> None:
        self.scope = scope
        self.budget = budget
        self.point = point
        self.draw = random.Random(0)
        self.groups = scope.groups

    @property
    def measure_us(self) -> float:
        """Of the best walk so far."""
        return float("inf") if self.best is None else self.best.measure_us

    def tried(self, point: SearchPoint) -> bool:
        """Step 3; whether the point is kept."""
        self.budget.spend()
        self.stale += 1
        result = self.scope.walk(point, self.measure_us)
        if result is None or not self._improves(point, result):
            return False
        if result.measure_us < self._mark_us * (1.0 - GAIN):
            self._mark_us, self.stale = result.measure_us, 0
        self.best, self.point = result, point
        self.budget.keep_best(self.scope, result)
        return True

    def _improves(self, point: SearchPoint, result: WalkResult) -> bool:
        """The list scheduler keeps the limit wherever it can; a given order must keep it."""
        best, limit = self.best, self.scope.limit_bytes
        if best is None:
            return True
        if point.orders and limit is not None and result.peak_bytes > max(limit, best.peak_bytes):
            return False
        return (result.measure_us, result.peak_bytes) <= (best.measure_us, best.peak_bytes)

    @property
    def close(self) -> bool:
        """Whether there is nothing to gain."""
        return self.best is not None and self.best.step_us <= self.scope.enough_us

    @property
    def ended(self) -> bool:
        """Whether there is nothing to gain, or no walk left."""
        return self.close or not self.budget.left

    def go(self, move: Move, most: int, stale: int) -> OrderSearch:
        """So many moves at most, and so many walks without a gain; itself."""
        self.stale = 0
        for _ in range(most if self.best is not None else 0):
            if self.ended or self.stale >= stale:
                break
            for point in move(self):
                if not self.ended:
                    self.tried(point)
        return self


Move = Callable[[OrderSearch], Iterable[SearchPoint]]
"""Neighbours of where a search has come."""


def new_urgencies(search: OrderSearch) -> Iterator[SearchPoint]:
    """A move: another urgency of one to three stretches of ops, or of all ops of some actions, or another
    patience of a rank. Urgency changes for a full stretch, since what counts is which communication is
    reached first."""
    draw, point, windows = search.draw, search.point, search.scope.windows
    urgency = [list(of_rank) for of_rank in point.urgency]
    change_us = search.scope.change_us
    kind = draw.random()
    if kind >= 0.92:
        patience = list(point.patience)
        patience[draw.randrange(len(patience))] = draw.choice(PATIENCE)
        yield replace(point, patience=tuple(patience))
        return
    if kind < 0.5 or all(len(window.microbatches) == 1 for window in windows):
        for _ in range(draw.choice((1, 1, 2, 3))):
            rank, group = draw.choice(search.groups)
            by_us = draw.gauss(0.0, change_us)
            for index in group:
                urgency[rank][index] += by_us
    else:
        for _ in range(draw.choice((1, 1, 2))):
            rank = draw.randrange(len(windows))
            part = draw.randrange(len(windows[rank].microbatches))
            by_us = draw.gauss(0.0, draw.choice((0.25, 1.25)) * change_us)
            for index, node in enumerate(windows[rank].graph.nodes):
                if node.item.part == part:
                    urgency[rank][index] += by_us
    yield replace(point, urgency=tuple(urgency))
