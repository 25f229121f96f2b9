"""The one search for orders: a neighbourhood of points, of which each is walked, and the best kept.

    1. A point says how a scope is walked: by urgencies (`order.listing`), or in orders that are given
       (`order.follow`). A scope is a window by itself or a step in which each rank has one window; there is
       no other difference between the two.
    2. From the best point so far, moves (`order.moves`, `order.push`) make others.
    3. A point is kept unless what is ordered takes longer. Of equal ones the one that holds less memory is.
    4. The search ends where the order is close to what no order can beat, where nothing was gained for a
       while, and where its budget of walks is spent.

Walks are counted, not timed, and draws have a fixed seed, so equal jobs get equal plans on every machine. A
walk is given up as soon as it is known to be longer than the best.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from stretto.ir.plan import Plan
from stretto.order.depend import Outside
from stretto.order.follow import Following
from stretto.order.listing import Listing
from stretto.order.pairs import Borders, Meetings
from stretto.order.scope import Whole
from stretto.order.walk import Chosen, Rank, walk
from stretto.order.worlds import StepWorld, WindowWorld
from stretto.passes.watch import Watch

T = TypeVar("T")

GAIN = 0.0005
"""Share of what is ordered that counts as a gain. Assumed."""


@dataclass(frozen=True, slots=True)
class Point:
    """By rank: how urgent nodes are, and step 3 of `order.listing`; or, instead of these, the order of the
    nodes that stand for themselves. pairs: messages that leave together. outside: by window's name, what its
    runs see of other ranks (`order.refine`)."""

    urgency: tuple[Sequence[float], ...] = ()
    patience: tuple[float, ...] = ()
    pairs: Borders = ()
    orders: tuple[Sequence[int], ...] = ()
    outside: Mapping[str, Outside] = field(default_factory=dict)


@dataclass(frozen=True)
class Scope:
    """What is ordered: by rank, a window. enough_us: an order that takes no more need not be improved.
    change_us: by how much urgencies are changed. plan: of the step; None for a window by itself.
    limit_bytes: what a rank may hold above what it holds at its begin, if that is counted.
    """

    wholes: tuple[Whole, ...]
    enough_us: float
    change_us: float
    plan: Plan | None = None
    limit_bytes: int | None = None

    def walk(self, point: Point, most_us: float = float("inf")) -> Chosen | None:
        """None when ranks wait for ever, or one takes longer than most_us."""
        world = WindowWorld(self.wholes[0].graph) if self.plan is None else StepWorld(self.plan)
        meet = Meetings(point.pairs, world.clock).meet if point.pairs else None
        ranks: list[Rank] = []
        for rank, whole in enumerate(self.wholes):
            memory = None if self.limit_bytes is None else whole.memory.empty()
            if point.orders:
                ranks.append(Following(world, rank, whole, point.orders[rank], memory))
            else:
                mine = point.urgency[rank], point.patience[rank], meet, memory, self.limit_bytes or 0
                ranks.append(Listing(world, rank, whole, *mine))
        return walk(world, ranks, most_us)

    def given(self, found: Chosen) -> Point:
        """The orders that were found."""
        mine = zip(self.wholes, found.orders, strict=True)
        return Point(orders=tuple(whole.names(order) for whole, order in mine))

    @property
    def groups(self) -> list[tuple[int, list[int]]]:
        """(rank, nodes) of what changes together (`Whole.stretches`)."""
        return [(rank, group) for rank, whole in enumerate(self.wholes) for group in whole.stretches]


class Budget:
    """left: walks that may be made; spent: those that were. best: what all searches that share it have found,
    and the scope of it. watch: is told of it; bound_us: what no order beats, where that is known; of: which
    step it is, in words for who is told."""

    def __init__(self, left: int, watch: Watch | None = None, bound_us: float = 0.0, of: str = "") -> None:
        self.left = self.allowed = left
        self.spent = 0
        self.best: tuple[Scope, Chosen] | None = None
        self.bound_us = bound_us
        self._of = of
        self._watch = watch or Watch()

    def spend(self) -> None:
        """A walk is made."""
        self.spent += 1
        self.left = max(0, self.left - 1)
        if self.best is not None:
            self._watch.still(self._far)

    def found(self, scope: Scope, found: Chosen) -> None:
        """A search has come to this."""
        if self.best is None or found.measure_us < self.best[1].measure_us:
            self.best = scope, found

    def _far(self) -> str:
        assert self.best is not None
        best_us = self.best[1].step_us
        of_bound = f", {best_us / self.bound_us:.3f} of the bound" if self.bound_us else ""
        best = f"best {best_us / 1000:.1f} ms{self._of}{of_bound}"
        return f"{self.spent} of at most {self.allowed} orders walked, {best}"

    def keep(self, part: float) -> int:
        """Take a part away, for later; how much it is."""
        kept = int(part * self.left)
        self.left -= kept
        return kept

    def shared(self, many: Sequence[T]) -> Iterator[T]:
        """Each in its turn, with an equal share; what one leaves goes to those behind it."""
        for at, one in enumerate(many):
            behind = len(many) - 1 - at
            kept = self.keep(behind / (behind + 1))
            yield one
            self.left += kept


class Search:
    """A search that has come to a point. best: its walk, None where no point was walked to its end; groups:
    as in `Scope`; stale: walks since the last gain."""

    best: Chosen | None = None
    stale = 0
    _mark_us = float("inf")

    def __init__(self, scope: Scope, budget: Budget, point: Point = Point()) -> None:
        self.scope = scope
        self.budget = budget
        self.point = point
        self.draw = random.Random(0)
        self.groups = scope.groups

    @property
    def measure_us(self) -> float:
        """Of the best walk so far."""
        return float("inf") if self.best is None else self.best.measure_us

    def tried(self, point: Point) -> bool:
        """Step 3; whether the point is kept."""
        self.budget.spend()
        self.stale += 1
        found = self.scope.walk(point, self.measure_us)
        if found is None or not self._serves(point, found):
            return False
        if found.measure_us < self._mark_us * (1.0 - GAIN):
            self._mark_us, self.stale = found.measure_us, 0
        self.best, self.point = found, point
        self.budget.found(self.scope, found)
        return True

    def _serves(self, point: Point, found: Chosen) -> bool:
        """What is listed keeps the limit wherever it can; an order that is given must keep it."""
        best, limit = self.best, self.scope.limit_bytes
        if best is None:
            return True
        if point.orders and limit is not None and found.peak_bytes > max(limit, best.peak_bytes):
            return False
        return (found.measure_us, found.peak_bytes) <= (best.measure_us, best.peak_bytes)

    @property
    def close(self) -> bool:
        """Whether there is nothing to gain."""
        return self.best is not None and self.best.step_us <= self.scope.enough_us

    @property
    def ended(self) -> bool:
        """Whether there is nothing to gain, or no walk left."""
        return self.close or not self.budget.left

    def go(self, move: Move, most: int, stale: int) -> Search:
        """So many moves at most, and so many walks without a gain; itself."""
        self.stale = 0
        for _ in range(most if self.best is not None else 0):
            if self.ended or self.stale >= stale:
                break
            for point in move(self):
                if not self.ended:
                    self.tried(point)
        return self


Move = Callable[[Search], Iterable[Point]]
"""Neighbours of where a search has come."""
