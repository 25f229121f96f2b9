"""The one walk of time of this room: ranks' compute lanes, event by event, in a full step or in one window.

1. A rank's compute lane does one op after another. A subclass chooses the next: the most urgent
   (`order.list_scheduler`), or the next of a given order (`GivenOrder`).
2. What ranks share, and how long things take, is in `order.resources`.
3. A wait for a collective waits for the slowest rank of the pipeline rank too (`simulating.compute_lane`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from stretto.order.depend import Node, Role, WindowGraph
from stretto.order.rank_window import RankWindow, WindowMemory, make_rank_window
from stretto.order.resources import WindowResources
from stretto.simulating.cards import Moment
from stretto.simulating.compute_lane import Straggler

STALL_WEIGHT = 0.01
"""What a microsecond of a lane's stall for a collective counts beside a microsecond of the step. Measured on
GPTs over pp=2 tp=2: steps are as long as without it, and lanes stall a tenth less."""


@dataclass(frozen=True, slots=True)
class WalkTimes:
    """When things happened on one rank. ends_us: by node, when it was done; stretch: how many times its ops'
    times its compute lane worked; lane_us: by start, how long its collective had its lane."""

    ends_us: Sequence[float]
    stretch: float
    lane_us: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class WalkResult:
    """How long the step took, or a window with all that it starts; and by rank the order of the window's
    nodes. end_us: when the last lane had ended; stall_us, exposed_us: of all ranks, how long
    lanes waited, and for collectives; timings: by rank; peak_bytes: the most of a rank above that at the
    begin, where memory is counted."""

    step_us: float
    orders: tuple[tuple[int, ...], ...]
    end_us: float
    stall_us: float
    exposed_us: float
    timings: tuple[WalkTimes, ...] = field(default=(), repr=False)
    peak_bytes: int = 0

    @property
    def measure_us(self) -> float:
        """What the search makes smaller. A rank that others wait for anyway loses nothing by a stall, in a
        step that goes as planned; but what it hides helps when something takes longer."""
        return self.step_us + STALL_WEIGHT * self.exposed_us


class TooLongError(Exception):
    """A walk was given up."""


def walk(resources: WindowResources, ranks: Sequence[LaneWalk], most_us: float = inf) -> WalkResult | None:
    """Let the ranks go to their end; None when they wait forever, or take longer than most_us."""
    most_us *= 1.0 + 1e-9  # sums of floats in another order
    try:
        for rank in ranks:
            rank.last_us = most_us - rank.window.work_us
            rank.begin()
        resources.clock.run()
    except TooLongError:
        return None
    if any(len(rank.order) < len(rank.graph.nodes) for rank in ranks):
        return None
    step_us = max(max(rank.end_us, rank.late_us) for rank in ranks)
    if step_us > most_us:
        return None
    return WalkResult(
        step_us,
        tuple(tuple(rank.order) for rank in ranks),
        max(rank.end_us for rank in ranks),
        sum(rank.end_us - rank.worked_us for rank in ranks),
        sum(rank.exposed_us for rank in ranks),
        tuple(rank.timing() for rank in ranks),
        max(rank.memory.peak if rank.memory is not None else 0 for rank in ranks),
    )


class LaneWalk(ABC):
    """One rank's compute lane. order: the nodes so far; worked_us: how long the lane has worked;
    memory: of the rank, if it is counted; last_us: the most that the lane may have waited when it goes on."""

    last_us: float

    def __init__(
        self, resources: WindowResources, rank: int, window: RankWindow, memory: WindowMemory | None = None
    ) -> None:
        self.graph = window.graph
        self.order: list[int] = []
        self.end_us = self.exposed_us = self.worked_us = 0.0
        self.memory = memory
        self._resources = resources
        self._clock = resources.clock
        self._rank = rank
        self.window = window
        self._placed = [False] * len(self.graph.nodes)
        self._started: dict[int, Moment] = {}
        self._straggler = Straggler(resources.skew)
        self._working = False
        """Whether the lane works, or waits for the slowest rank of its pipeline rank."""
        self._idle_since_us: float | None = None
        """Since when the lane has waited, and no one has counted."""
        self._ends_us = [0.0] * len(self.graph.nodes)
        self._work_us = 0.0

    @property
    def late_us(self) -> float:
        """At the end of the walk: when what it started and did not wait for had ended."""
        return max((self._started[index].us for index in self.window.leaving), default=0.0)

    def begin(self) -> None:
        """Post all receives, and go on until the lane works or waits."""
        for node in self.graph.nodes:
            if node.role is Role.RECEIVE:
                self._resources.post(node, self._microbatch(node))
        self._go_on()

    def timing(self) -> WalkTimes:
        """At the end of the walk."""
        lane_us: dict[int, float] = {}
        free_us: dict[str, float] = {}
        for index, started in sorted(self._started.items(), key=lambda pair: pair[1].us):
            lane = self.graph.nodes[index].lane
            begun_us = max(free_us.get(lane, 0.0), self._ends_us[index])
            lane_us[index] = max(0.0, started.us - begun_us)
            free_us[lane] = started.us
        stretch = self.worked_us / self._work_us if self._work_us else 1.0
        return WalkTimes(self._ends_us, stretch, lane_us)

    @abstractmethod
    def _go_on(self) -> None:
        """The lane is free: put what comes next, until the lane works or waits."""

    def _microbatch(self, node: Node) -> int:
        return self.window.microbatches[node.item.part]

    def _arrival(self, index: int) -> Moment | None:
        """What a wait or a receive waits for; None when it is there."""
        node = self.graph.nodes[index]
        if node.role is Role.FINISH and node.start >= 0:
            moment: Moment | None = self._started[node.start]
        elif node.role is Role.FINISH or node.role is Role.RECEIVE:
            moment = self._resources.arrival(node, self._microbatch(node))
        else:
            return None
        return None if moment is None or moment.happened else moment

    def _wake(self, index: int) -> None:
        """What a node waits for has arrived; a lane that works sees it when its op has ended."""
        if self._idle_since_us is not None:
            if self.graph.nodes[index].role in (Role.START, Role.FINISH) and not self.end_us:
                self.exposed_us += self._clock.now_us - self._idle_since_us
            self._idle_since_us = self._clock.now_us
        self._resources.soon(self._resume)

    def _resume(self) -> None:
        if not self._working:
            if self._clock.now_us - self._work_us > self.last_us:
                raise TooLongError
            self._go_on()

    def _put(self, nodes: Iterable[int]) -> tuple[float, float]:
        """These come next, in this order. Returns how long the lane waits for the slowest rank of
        its pipeline rank, and their work, in microseconds."""
        late_us = work_us = 0.0
        now_us = self._clock.now_us
        for index in nodes:
            node = self.graph.nodes[index]
            self._placed[index] = True
            self._ends_us[index] = now_us
            self.order.append(index)
            work_us += node.work_us
            if self.memory is not None:
                self.memory.take(index)
            if node.role is Role.FINISH:
                done_us = self._started[node.start].us if node.start >= 0 else node.time_us
                late_us += self._straggler.meet(now_us + late_us - done_us)
        return late_us, work_us

    def _busy(self, index: int, late_us: float, work_us: float) -> bool:
        """Let the lane wait for the slowest rank, and then work; False if that is over."""
        if late_us > 0.0:
            self._waits_now()
            if not self._clock.skip(self._clock.now_us + late_us):
                self._working, self._idle_since_us = True, None
                self._clock.at(self._clock.now_us + late_us, partial(self._met, index, work_us))
                return True
        if late_us > 0.0 or work_us:
            self._idle_since_us = None
        return bool(work_us) and not self._work(index, work_us)

    def _waits_now(self) -> None:
        if self._idle_since_us is None:
            self._idle_since_us = self._clock.now_us

    def _met(self, index: int, work_us: float) -> None:
        """The slowest rank has arrived as well."""
        self._working = False
        if not work_us or self._work(index, work_us):
            self._done(index)
            self._go_on()

    def _work(self, index: int, work_us: float) -> bool:
        """Let the lane work; whether that is over."""
        since_us = self._clock.now_us
        self._work_us += work_us
        if self._resources.skip(work_us):
            self._stop(since_us, work_us)
            return True
        self._working = True
        self._resources.work(self._rank, work_us, partial(self._worked, index, since_us, work_us))
        return False

    def _worked(self, index: int, since_us: float, work_us: float) -> None:
        self._working = False
        self._stop(since_us, work_us)
        self._done(index)
        self._go_on()

    def _stop(self, since_us: float, work_us: float) -> None:
        self.worked_us += self._clock.now_us - since_us
        self._resources.worked(self._rank, self._straggler, work_us)

    def _done(self, index: int) -> None:
        """The node's work is done: what it starts or sends goes."""
        self._ends_us[index] = self._clock.now_us
        node = self.graph.nodes[index]
        if node.role is Role.COMPUTE:
            return
        if node.role is Role.SEND:
            self._resources.send(node, self._microbatch(node))
        elif node.role is Role.START:
            self._started[index] = self._resources.start(self._rank, self.window, index)


def replay(graph: WindowGraph, order: Sequence[int]) -> WalkResult:
    """Walk a legal order of the graph's nodes."""
    resources, memory = WindowResources(graph.skew), WindowMemory(len(graph.nodes), graph.storages)
    result = walk(resources, [GivenOrder(resources, 0, make_rank_window(graph), order, memory)])
    assert result is not None, "a legal order of one window comes to its end"
    return result


class GivenOrder(LaneWalk):
    """A compute lane whose ops come in a given order: of all nodes, or of those that are placed by
    themselves; what such a node needs then comes directly before it. The lane waits for what the next node
    waits for, even if another could go."""

    def __init__(
        self,
        resources: WindowResources,
        rank: int,
        window: RankWindow,
        given: Sequence[int],
        memory: WindowMemory | None = None,
    ) -> None:
        super().__init__(resources, rank, window, memory)
        self._given = given
        self._all = len(given) == len(window.placed)
        self._next = 0

    def _go_on(self) -> None:
        while self._next < len(self._given):
            index = self._given[self._next]
            needs = (index,) if self._all else self.window.needs[index]
            missing = [n for n in needs if not self._placed[n]]
            if self._awaits(missing):
                return
            self._next += 1
            if self._busy(index, *self._put(missing)):
                return
            self._done(index)
        rest = () if self._all else self.window.rest
        if not self.end_us and not self._awaits(rest):
            self._waits_now()
            self._put(rest)
            self.end_us = self._clock.now_us

    def _awaits(self, nodes: Sequence[int]) -> bool:
        """Whether something has not arrived; then the lane goes on when it has."""
        for index in nodes:
            arrival = self._arrival(index)
            if arrival is not None:
                self._waits_now()
                arrival.then(partial(self._wake, index))
                return True
        return False
