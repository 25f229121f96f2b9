"""What the ranks of a walk share: collectives, messages, and how fast a lane works meanwhile.

1. `WindowResources`, of a window by itself, has one rank and the lanes of its collectives, each with its time
   for itself; while these take a share of the processor, compute goes slower by that share. Other ranks
   are known by when their messages arrive. What is under way is then known to its end, so time may go on
   op by op, without events.
2. `StepResources`, of a step in which each rank has one window, is the simulation's: collectives, messages,
   shared cards, what they take of processors. So an order takes as long here as it takes when it is
   simulated, but for what follows a step's last window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

from stretto.ir.plan import Plan
from stretto.order.depend import Node
from stretto.order.rank_window import RankWindow
from stretto.simulating.cards import Cards, Clock, Moment
from stretto.simulating.collectives import Collectives
from stretto.simulating.compute_lane import ComputeLane, Straggler
from stretto.simulating.network import Network


class WindowResources:
    """Step 1: one rank that knows nothing of others."""

    def __init__(self, skew: float) -> None:
        self.clock = Clock()
        self.skew = skew
        self._free_us: dict[str, float] = {}
        self._flights: list[tuple[float, float, float]] = []
        """(begin, end, load) of those that slow compute down."""

    def start(self, rank: int, window: RankWindow, index: int) -> Moment:
        """A node starts its collective now. When it is done; its time is known before, if it depends on no
        other rank."""
        node = window.graph.nodes[index]
        begin_us = max(self.clock.now_us, self._free_us.get(node.lane, 0.0))
        end_us = self._free_us[node.lane] = begin_us + node.time_us
        if node.load > 0.0 and node.time_us > 0.0:
            self._flights.append((begin_us, end_us, node.load))
        return self._at(end_us)

    def arrival(self, node: Node, microbatch: int) -> Moment | None:
        """When what comes from outside the window is there, for a node that waits for it; None: at once."""
        return self._at(node.time_us)

    def _at(self, time_us: float) -> Moment:
        """A moment at that time, or that has been."""
        moment = Moment()
        moment.happened, moment.us = time_us <= self.clock.now_us, time_us
        if not moment.happened:
            self.clock.at(time_us, partial(moment.happen, self.clock))
        return moment

    def work(self, rank: int, work_us: float, then: Callable[[], None]) -> None:
        """Let the lane work; `then` is called at its end."""
        end_us = self._end_us(self.clock.now_us, work_us)
        self.clock.at(end_us, partial(self.clock.at, end_us, then))  # behind what arrives at that time

    def skip(self, work_us: float) -> bool:
        """Let the lane work, if nothing else happens meanwhile; whether that is over."""
        now_us = self.clock.now_us
        return self.clock.skip(self._end_us(now_us, work_us) if self._flights else now_us + work_us)

    def worked(self, rank: int, straggler: Straggler, work_us: float) -> None:
        """The pipeline rank has worked so much."""
        if self.skew:
            straggler.work(work_us)

    def send(self, node: Node, microbatch: int) -> None:
        """A message goes now."""

    def post(self, node: Node, microbatch: int) -> None:
        """The buffer of a message is there from now on."""

    def soon(self, go_on: Callable[[], None]) -> None:
        """Something has arrived, for which a lane may go on."""
        self.clock.at(self.clock.now_us, go_on)

    def _end_us(self, now_us: float, work_us: float) -> float:
        """When work that begins now is done, beside what is under way."""
        flights = self._flights
        while flights and flights[0][1] <= now_us:
            flights.pop(0)
        while flights and work_us > 0.0:
            speed, until_us = 1.0, inf
            for begin_us, end_us, load in flights:
                if begin_us > now_us:
                    until_us = min(until_us, begin_us)
                elif end_us > now_us:
                    speed -= load
                    until_us = min(until_us, end_us)
            if until_us == inf:
                break
            if speed > 1e-9:
                done_us = now_us + work_us / speed
                if done_us <= until_us:
                    return done_us
                work_us -= (until_us - now_us) * speed
            now_us = until_us
        return now_us + work_us


class StepResources(WindowResources):
    """Step 2: a plan in which each rank has one window."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.costs.skew)
        self.plan = plan
        self._cards = Cards(self.clock, self._change_load, alone=not plan.costs.shared)
        self._network = Network(plan, self.clock, self._cards, [])
        self._collectives = Collectives(plan, self.clock, self._cards, [])
        self._lanes = [ComputeLane(self.clock, plan.costs) for _ in range(plan.ranks)]

    def _change_load(self, rank: int, was: float, load: float) -> None:
        self._lanes[rank].change_load(was, load)

    def start(self, rank: int, window: RankWindow, index: int) -> Moment:
        call = window.calls[index]
        assert call is not None
        microbatch = window.microbatches[window.graph.nodes[index].item.part]
        return self._collectives.start(call, rank, microbatch).done

    def arrival(self, node: Node, microbatch: int) -> Moment | None:
        if not self._travels(node):
            return None
        return self._network.message(int(node.item.ref), microbatch).arrived

    def work(self, rank: int, work_us: float, then: Callable[[], None]) -> None:
        self._lanes[rank].work(work_us, then)

    def skip(self, work_us: float) -> bool:
        return False

    def soon(self, go_on: Callable[[], None]) -> None:
        go_on()

    def send(self, node: Node, microbatch: int) -> None:
        if self._travels(node):
            self._network.send(int(node.item.ref), microbatch)

    def post(self, node: Node, microbatch: int) -> None:
        if self._travels(node):
            self._network.post(int(node.item.ref), microbatch)

    def worked(self, rank: int, straggler: Straggler, work_us: float) -> None:
        straggler.work(work_us, self._lanes[rank].behind_us())

    def _travels(self, node: Node) -> bool:
        """Whether a send or a receive crosses ranks."""
        edge = self.plan.job.edges[int(node.item.ref)]
        return self.plan.rank_of(edge.source) != self.plan.rank_of(edge.target)
