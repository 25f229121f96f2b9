"""A step in which each rank has one window, walked event by event: what all ways to walk it share.

    1. A rank's compute lane does one op after another. Which comes next, a subclass says: by how urgent ops
       are (`together.choose`), or by an order that is given (`together.follow`).
    2. Collectives, messages, shared cards, what they take of processors, and how far ranks of a place come
       apart are those of the simulation. So an order takes as long here as it takes when it is simulated, but
       for what follows a step's last window.

May touch `stretto.ir`, `stretto.schedule`, `stretto.simulate` and `together.whole`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from stretto.ir.plan import Plan
from stretto.order import Role
from stretto.order.depend import Node
from stretto.order.whole_step.rank_step import Whole
from stretto.simulate.cards import Cards
from stretto.simulate.clock import Clock
from stretto.simulate.collectives import Collective, Collectives
from stretto.simulate.compute_lane import ComputeLane
from stretto.simulate.network import Message, Network
from stretto.simulate.straggler import Straggler

STANDING = 0.01
"""What a lane's standing for collectives counts beside the step, where single ops are moved. Measured on GPTs
over pp=2 tp=2: steps are as long as without it, and lanes stand a tenth less."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When things happened on one rank. ends_us: by node, when it was done; stretch: how many times its ops'
    times its compute lane worked; lane_us: by start, how long its collective had its lane."""

    ends_us: Sequence[float]
    stretch: float
    lane_us: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Chosen:
    """How long the step took, and by rank the order of its window's nodes. exposed_us: of all ranks, how long
    lanes stood for collectives; timings: by rank."""

    step_us: float
    orders: tuple[tuple[int, ...], ...]
    exposed_us: float
    timings: tuple[Timing, ...] = field(default=(), repr=False)

    @property
    def measure_us(self) -> float:
        """What moves make less of. A rank that others wait for anyway loses nothing by standing, in a step
        that goes as it was planned; but what it hides is there when something takes longer."""
        return self.step_us + STANDING * self.exposed_us


class Walk:
    """One step: its clock, and what its ranks share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock = Clock()
        self.cards = Cards(self.clock, self._change_load, alone=not plan.costs.shared)
        self.network = Network(plan, self.clock, self.cards, [])
        self.collectives = Collectives(plan, self.clock, self.cards, [])
        self._ranks: Sequence[Rank] = ()

    def _change_load(self, rank: int, was: float, load: float) -> None:
        self._ranks[rank].lane.change_load(was, load)

    def run(self, make: Callable[[int], Rank]) -> Chosen | None:
        """Walk the step; None when ranks stand for ever. make: the rank of a number."""
        self._ranks = [make(rank) for rank in range(self.plan.ranks)]
        for rank in self._ranks:
            rank.begin()
        self.clock.run()
        if any(len(rank.order) < len(rank.graph.nodes) for rank in self._ranks):
            return None
        return Chosen(
            max(rank.end_us for rank in self._ranks),
            tuple(tuple(rank.order) for rank in self._ranks),
            sum(rank.exposed_us for rank in self._ranks),
            tuple(rank.timing() for rank in self._ranks),
        )


class Rank(ABC):
    """One rank's compute lane. order: the nodes so far."""

    def __init__(self, walk: Walk, rank: int, whole: Whole) -> None:
        costs = walk.plan.costs
        self.graph = whole.graph
        self.order: list[int] = []
        self.end_us = self.exposed_us = 0.0
        self.lane = ComputeLane(walk.clock, costs)
        self._walk = walk
        self._clock = walk.clock
        self._rank = rank
        self._whole = whole
        self._placed = [False] * len(self.graph.nodes)
        self._started: dict[int, Collective] = {}
        self._straggler = Straggler(costs.skew)
        self._meeting = False
        """Whether the lane stands for the slowest rank of its place."""
        self._stood_since_us: float | None = None
        """Since when the lane has stood, and nobody has counted."""
        self._ends_us = [0.0] * len(self.graph.nodes)
        self._since_us = self._work_us = self._worked_us = 0.0

    def begin(self) -> None:
        """Post all receives, and go on until the lane works or stands."""
        for node in self.graph.nodes:
            if node.role is Role.RECEIVE and self._travels(node):
                self._walk.network.post(int(node.item.ref), self._whole.microbatches[node.item.part])
        self._go_on()

    def timing(self) -> Timing:
        """At the end of the walk."""
        lane_us: dict[int, float] = {}
        free_us: dict[str, float] = {}
        for index, started in sorted(self._started.items(), key=lambda pair: pair[1].done_us):
            lane = self.graph.nodes[index].lane
            begun_us = max(free_us.get(lane, 0.0), self._ends_us[index])
            lane_us[index] = max(0.0, started.done_us - begun_us)
            free_us[lane] = started.done_us
        stretch = self._worked_us / self._work_us if self._work_us else 1.0
        return Timing(self._ends_us, stretch, lane_us)

    @abstractmethod
    def _go_on(self) -> None:
        """The lane is free: place what comes next, until the lane works or stands."""

    def _travels(self, node: Node) -> bool:
        """Whether a send or a receive crosses ranks."""
        plan = self._walk.plan
        edge = plan.job.edges[int(node.item.ref)]
        return plan.rank_of(edge.source) != plan.rank_of(edge.target)

    def _message(self, node: Node) -> Message:
        return self._walk.network.message(int(node.item.ref), self._whole.microbatches[node.item.part])

    def _wake(self, index: int) -> None:
        """What a node waits for has arrived; a lane that works sees it when its op has ended."""
        if self._stood_since_us is not None:
            if self.graph.nodes[index].role in (Role.START, Role.FINISH):
                self.exposed_us += self._clock.now_us - self._stood_since_us
            self._stood_since_us = self._clock.now_us
        if not self.lane.working and not self._meeting:
            self._go_on()

    def _put(self, nodes: Iterable[int]) -> tuple[float, float]:
        """These come next, in this order. Returns how long the lane stands for the slowest rank of its place,
        and their work, in microseconds."""
        late_us = work_us = 0.0
        for index in nodes:
            node = self.graph.nodes[index]
            self._placed[index] = True
            self._ends_us[index] = self._clock.now_us
            self.order.append(index)
            work_us += node.work_us
            if node.role is Role.FINISH and node.start >= 0:
                done_us = self._started[node.start].done_us
                late_us += self._straggler.meet(self._clock.now_us + late_us - done_us)
        return late_us, work_us

    def _busy(self, index: int, late_us: float, work_us: float) -> bool:
        """Let the lane stand for the slowest rank, and then work; False if it has neither to do."""
        if late_us > 0.0:
            self._stands()
            self._meeting = True
            self._clock.at(self._clock.now_us + late_us, partial(self._met, index, work_us))
        elif work_us:
            self._work(index, work_us)
        else:
            return False
        self._stood_since_us = None
        return True

    def _stands(self) -> None:
        if self._stood_since_us is None:
            self._stood_since_us = self._clock.now_us

    def _met(self, index: int, work_us: float) -> None:
        """The slowest rank of the place is there as well."""
        self._meeting = False
        if work_us:
            self._work(index, work_us)
        else:
            self._since_us = self._clock.now_us
            self._worked(index, 0.0)

    def _work(self, index: int, work_us: float) -> None:
        self._since_us = self._clock.now_us
        self._work_us += work_us
        self.lane.work(work_us, partial(self._worked, index, work_us))

    def _worked(self, index: int, work_us: float) -> None:
        self._worked_us += self._clock.now_us - self._since_us
        self._straggler.work(work_us, self.lane.behind_us())
        self._done(index)
        self._go_on()

    def _done(self, index: int) -> None:
        """The node's work is done: what it starts or sends goes."""
        self._ends_us[index] = self._clock.now_us
        node = self.graph.nodes[index]
        microbatch = self._whole.microbatches[node.item.part]
        if node.role is Role.SEND and self._travels(node):
            self._walk.network.send(int(node.item.ref), microbatch)
        elif node.role is Role.START:
            call = self._whole.calls[index]
            assert call is not None
            self._started[index] = self._walk.collectives.start(call, self._rank, microbatch)
