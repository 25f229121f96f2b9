"""The one local search for orders: neighbours of a point are walked, and the best is kept.

    1. A point describes how a scope is walked: by urgencies (`order.list_scheduler`), or in given orders
       (`order.walk`). A scope is a window by itself, or a step in which each rank has one window; there is no
       other difference between the two.
    2. From the best point so far, moves make others: `new_urgencies`, `ForwardBackward`.
    3. A point is kept unless what is ordered takes longer. Of equal ones the one with less memory is.
    4. The search ends where the order is close to what no order can beat, where nothing was gained for a
       while, and where its budget of walks is spent.

Walks are counted, not timed, and draws have a fixed seed, so equal jobs get equal plans on every machine. A
walk is given up as soon as it is known to be longer than the best.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from stretto.ir.plan import Plan
from stretto.order.depend import Role
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


OFF = (0.05, 0.25, 0.75, 1.5)
"""How far ends are off in step 3: standard deviations, in parts of what urgencies are changed by. Measured on
GPTs over pp=2 tp=2: without the large ones steps are up to 5 % longer, with larger ones as well."""

RankNode = tuple[int, int]
"""(rank, node)."""


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

    def walk(self, point: SearchPoint, most_us: float = inf) -> WalkResult | None:
        """None when ranks wait forever, or one takes longer than most_us."""
        graph = self.windows[0].graph
        resources = WindowResources(graph.skew) if self.plan is None else StepResources(self.plan)
        ranks: list[LaneWalk] = []
        for rank, window in enumerate(self.windows):
            memory = None if self.limit_bytes is None else window.memory.empty()
            if point.orders:
                ranks.append(GivenOrder(resources, rank, window, point.orders[rank], memory))
            else:
                rules = point.urgency[rank], point.patience[rank], memory, self.limit_bytes or 0
                ranks.append(ListScheduler(resources, rank, window, *rules))
        return walk(resources, ranks, most_us)


class WalkBudget:
    """left: walks that may be made; spent: those that were. best: of all searches that share the budget, with
    its scope. watch: takes lines of progress; bound_us: what no order beats, where that is known."""

    def __init__(self, left: int, watch: Watch | None = None, bound_us: float = 0.0) -> None:
        self.left = self.allowed = left
        self.spent = 0
        self.best: tuple[SearchScope, WalkResult] | None = None
        self.bound_us = bound_us
        self._watch = watch or Watch()

    def spend(self) -> None:
        """A walk is made."""
        self.spent += 1
        self.left = max(0, self.left - 1)
        if self.best is not None:
            self._watch.still(self._progress)

    def _progress(self) -> str:
        assert self.best is not None
        best_us = self.best[1].step_us
        of_bound = f", {best_us / self.bound_us:.3f} of the bound" if self.bound_us else ""
        best = f"best {best_us / 1000:.1f} ms{of_bound}"
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
    (rank, nodes) of what changes together (`RankWindow.stretches`); stale: walks since the last gain."""

    best: WalkResult | None = None
    stale = 0
    _mark_us = inf

    def __init__(self, scope: SearchScope, budget: WalkBudget) -> None:
        self.scope = scope
        self.budget = budget
        self.point = SearchPoint()
        self.draw = random.Random(0)
        windows = enumerate(scope.windows)
        self.groups = [(rank, group) for rank, window in windows for group in window.stretches]

    @property
    def measure_us(self) -> float:
        """Of the best walk so far."""
        return inf if self.best is None else self.best.measure_us

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
        before = self.budget.best
        if before is None or result.measure_us <= before[1].measure_us:
            self.budget.best = self.scope, result
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

    def settled(self, move: Move) -> OrderSearch:
        """What draws have left behind: moves that draw nothing, until one is in vain; itself."""
        before_us = inf
        while self.measure_us < before_us and not self.close:
            before_us, self.stale = self.measure_us, 0
            for point in move(self):
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


class ForwardBackward:
    """A move, forward-backward improvement, as for projects with scarce resources (Valls,
    Ballestin and Quintanilla, "Justification and RCPSP: a technique that pays", European Journal of
    Operational Research 165, 2005):

    1. A step has been walked, so each op's end is known. From the last end to the first, each op is put as
       late as what needs it and its lane allow, also into gaps that later ops have left: the backward pass.
    2. By where ops begin in it, they are ordered, and the step is walked again, forward: in that order, and
       with what begins first as the most urgent.
    3. Where the last move was in vain, ends are a little off, by another draw for each stretch of ops.

    The backward pass is rougher than the walk: lanes take one thing at a time, for as long as it took in the
    walk, and nothing slows another.
    """

    def __init__(self, windows: Sequence[RankWindow]) -> None:
        self._windows = windows
        self._graphs = [window.graph for window in windows]
        ends: dict[Role, dict[tuple[int, int], RankNode]] = {Role.SEND: {}, Role.RECEIVE: {}}
        for rank, window in enumerate(windows):
            for index, node in enumerate(window.graph.nodes):
                if node.role in ends:
                    message = int(node.item.ref), window.microbatches[node.item.part]
                    ends[node.role][message] = rank, index
        sends, receives = ends.values()
        self._arrives = {key: receives[message] for message, key in sends.items() if message in receives}
        """Send -> its receive."""
        self._missing = {
            (rank, index): len(users) + ((rank, index) in self._arrives)
            for rank, graph in enumerate(self._graphs)
            for index, users in enumerate(graph.after)
        }
        self._sent = {receive: send for send, receive in self._arrives.items()}

    def __call__(self, search: OrderSearch) -> Iterator[SearchPoint]:
        """Where the last move was in vain, step 3."""
        best, draw = search.best, search.draw
        assert best is not None
        off: dict[RankNode, float] = {}
        if search.stale:
            deviation_us = draw.choice(OFF) * search.scope.change_us
            for rank, group in search.groups:
                by_us = draw.gauss(0.0, deviation_us)
                off.update({(rank, index): by_us for index in group})
        begins = self.begins_us(best, off)
        # Of ops that begin at one time those that are needed come first: nodes come behind what they use.
        ranks = zip(self._windows, begins, strict=True)
        yield SearchPoint(
            orders=tuple(
                sorted((index for index in range(len(of)) if window.placed[index]), key=of.__getitem__)
                for window, of in ranks
            )
        )
        yield SearchPoint(tuple([-us for us in of] for of in begins), (0.0,) * len(self._windows))

    def begins_us(self, walked: WalkResult, off_us: Mapping[RankNode, float]) -> list[list[float]]:
        """By rank and node, when it begins in the backward pass. off_us: by how much later than in `walked`
        an op is taken to have ended; 0 for others."""
        begins = [[0.0] * len(graph.nodes) for graph in self._graphs]
        missing = dict(self._missing)
        lanes: Lanes = defaultdict(_Lane)
        ready: list[tuple[float, int, int]] = []

        def can_go(key: RankNode) -> None:
            rank, index = key
            end_us = walked.timings[rank].ends_us[index] + off_us.get(key, 0.0)
            heapq.heappush(ready, (-end_us, -index, rank))

        def processed(key: RankNode) -> None:
            missing[key] -= 1
            if not missing[key]:
                can_go(key)

        for key, users in missing.items():
            if not users:
                can_go(key)
        while ready:
            _, minus, rank = heapq.heappop(ready)
            index = -minus
            begins[rank][index] = self._begin_us(rank, index, walked, begins, lanes)
            for needed in self._graphs[rank].before[index]:
                processed((rank, needed))
            sender = self._sent.get((rank, index))
            if sender is not None:
                processed(sender)
        return begins

    def _begin_us(
        self, rank: int, index: int, walked: WalkResult, begins: Sequence[Sequence[float]], lanes: Lanes
    ) -> float:
        graph, timing, end_us = self._graphs[rank], walked.timings[rank], walked.step_us
        node, mine = graph.nodes[index], begins[rank]
        lane_end_us = end_us
        for user in graph.after[index]:
            end_us = min(end_us, mine[user])
            if graph.nodes[user].start == index and graph.nodes[user].role is Role.FINISH:
                lane_end_us = min(lane_end_us, mine[user])
        work_us = node.work_us * timing.stretch
        if node.role is Role.START:
            goes_us = lanes[rank, node.lane].put(lane_end_us, timing.lane_us.get(index, node.time_us))
            end_us = min(end_us, goes_us + work_us)  # it goes to its lane with its start
        elif (rank, index) in self._arrives:
            receiver, receive = self._arrives[rank, index]
            arrives_us = begins[receiver][receive]
            end_us = min(end_us, lanes[rank, f"to {receiver}"].put(arrives_us, node.time_us))
        return lanes[rank, ""].put(end_us, work_us) if work_us else end_us


class _Lane:
    """What takes a lane, from the end of the step on: intervals that do not overlap, ascending."""

    __slots__ = ("_begins_us", "_ends_us")

    def __init__(self) -> None:
        self._begins_us: list[float] = []
        self._ends_us: list[float] = []

    def put(self, end_us: float, us: float) -> float:
        """Take the last `us` that are free and end by `end_us`; where they begin."""
        at = bisect_left(self._begins_us, end_us)
        while at > 0 and self._ends_us[at - 1] > end_us - us:
            end_us = min(end_us, self._begins_us[at - 1])
            at -= 1
        begin_us = end_us - us
        self._begins_us.insert(at, begin_us)
        self._ends_us.insert(at, end_us)
        return begin_us


Lanes = dict[tuple[int, str], _Lane]
"""(rank, lane) -> what takes it."""
