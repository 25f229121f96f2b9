"""All ranks of a step walked at once, each op chosen when its lane is free: orders of windows come out of it.

For steps in which each rank has one window. Where a window ordered by itself must be told when messages
arrive, here they arrive when the other rank has sent them. The contract:

1. A send that can go, goes. Of the ops whose values are there the most urgent is next, but before those for
   which the lane would have to stand until the slowest rank of its place has done its part of a collective.
2. Before it, the most urgent start of every lane that would run dry meanwhile; lanes keep their order.
3. Not if a start that is more urgent could be made soon after the lane is free: within `patience` times what
   the first would take. A lane that stands for a moment may be better than one that is taken.
4. If there is nothing to do, the compute lane stands until something arrives.
5. Waits, views and ops that take little stand directly before their first user.
6. Collectives, messages, shared cards, what they take of processors, and how far ranks of a place come apart
   are those of the simulation.

So an order takes as long here as it takes when it is simulated, but for what follows a step's last window.
May touch `stretto.ir`, `stretto.schedule` and `stretto.simulate`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stretto.ir.plan import Plan
from stretto.schedule.apart import Apart
from stretto.schedule.order import Role
from stretto.schedule.order.listing import AHEAD
from stretto.simulate.cards import Cards
from stretto.simulate.clock import Clock, Moment
from stretto.simulate.collectives import Collective, Collectives
from stretto.simulate.compute_lane import ComputeLane
from stretto.simulate.network import Network
from stretto.together.whole import Whole


@dataclass(frozen=True, slots=True)
class Chosen:
    """How long the step took, and by rank the order of its window's nodes."""

    step_us: float
    orders: tuple[tuple[int, ...], ...]


def choose(
    plan: Plan,
    wholes: Sequence[Whole],
    urgencies: Sequence[Sequence[float]],
    patience: Sequence[float],
) -> Chosen | None:
    """Walk the step; None when ranks stand for ever.

    wholes, urgencies, patience: by rank, its window, how urgent its nodes are, and step 3.
    """
    walk = _Walk(plan, wholes, urgencies, patience)
    walk.clock.run()
    if any(len(rank.order) < len(rank.graph.nodes) for rank in walk.ranks):
        return None
    return Chosen(max(rank.end_us for rank in walk.ranks), tuple(tuple(rank.order) for rank in walk.ranks))


class _Walk:
    def __init__(
        self,
        plan: Plan,
        wholes: Sequence[Whole],
        urgencies: Sequence[Sequence[float]],
        patience: Sequence[float],
    ) -> None:
        self.plan = plan
        self.clock = Clock()
        self.cards = Cards(self.clock, self._change_load, alone=not plan.costs.shared)
        self.network = Network(plan, self.clock, self.cards, [])
        self.collectives = Collectives(plan, self.clock, self.cards, [])
        self.ranks = [
            _Rank(self, rank, whole, urgencies[rank], patience[rank]) for rank, whole in enumerate(wholes)
        ]
        for one in self.ranks:
            one.begin()

    def _change_load(self, rank: int, was: float, share: float) -> None:
        self.ranks[rank].lane.change_load(was, share)


class _Rank:
    """One rank's compute lane, and what it knows of its others."""

    def __init__(
        self, walk: _Walk, rank: int, whole: Whole, urgency: Sequence[float], patience: float
    ) -> None:
        self._walk = walk
        self._clock = walk.clock
        self._rank = rank
        self._whole = whole
        self._urgency = urgency
        self._patience = patience
        self.graph = whole.graph
        self.order: list[int] = []
        self.end_us = 0.0
        count = len(self.graph.nodes)
        self._missing = [len(needs) for needs in self.graph.before]
        self._placed = [False] * count
        self._exists = [False] * count
        self._sends: list[tuple[float, int]] = []
        self._starts: dict[str, list[tuple[float, int]]] = {}
        """Lane -> starts that can go: (-urgency, node)."""
        self._ready: list[tuple[float, int]] = []
        self._started: dict[int, Collective] = {}
        self._flying: dict[str, int] = defaultdict(int)
        self._free_us: dict[str, float] = defaultdict(float)
        """Lane -> about when it has done what is started."""
        costs = walk.plan.costs
        self.lane = ComputeLane(walk.clock, costs.quota, costs.cold)
        self._apart = Apart(costs.skew)
        self._meeting = False
        """Whether the lane stands for the slowest rank of its place."""

    def begin(self) -> None:
        """Post all receives, and go on until the lane works or stands."""
        for node in self.graph.nodes:
            if node.role is Role.RECEIVE and self._travels(int(node.item.ref)):
                self._walk.network.post(int(node.item.ref), self._whole.microbatches[node.item.part])
        # Those that can go at once; what they let go, they let go themselves.
        for index in [n for n, missing in enumerate(self._missing) if not missing]:
            self._can_go(index)
        self._go_on()

    def _travels(self, edge: int) -> bool:
        plan = self._walk.plan
        return plan.rank_of(plan.job.edges[edge].source) != plan.rank_of(plan.job.edges[edge].target)

    # --- what can go ----------------------------------------------------------------------------------

    def _can_go(self, index: int) -> None:
        """All that a node needs is there."""
        node = self.graph.nodes[index]
        entry = -self._urgency[index], index
        if node.role is Role.FINISH and node.start >= 0:
            self._when(self._started[node.start].done, index)
        elif node.role is Role.RECEIVE and self._travels(int(node.item.ref)):
            microbatch = self._whole.microbatches[node.item.part]
            self._when(self._walk.network.message(int(node.item.ref), microbatch).arrived, index)
        elif self._whole.lazy[index]:
            self._there(index)
        elif node.role is Role.SEND:
            heapq.heappush(self._sends, entry)
        elif node.role is Role.START:
            heapq.heappush(self._starts.setdefault(node.lane, []), entry)
        else:
            heapq.heappush(self._ready, entry)

    def _wake(self) -> None:
        """Something has arrived; a lane that works sees it when its op has ended."""
        if not self.lane.working and not self._meeting:
            self._go_on()

    def _worked(self, index: int) -> None:
        self._done(index)
        self._go_on()

    def _when(self, moment: Moment, index: int) -> None:
        def arrive() -> None:
            self._there(index)
            self._wake()

        if moment.happened:
            self._there(index)
        else:
            moment.then(arrive)

    def _there(self, index: int) -> None:
        """The node's value exists from now on."""
        self._exists[index] = True
        for user in self.graph.after[index]:
            self._missing[user] -= 1
            if not self._missing[user]:
                self._can_go(user)

    # --- steps 1 to 5 ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        while True:
            if self._sends:
                index = heapq.heappop(self._sends)[1]
            else:
                work_us = self.graph.nodes[self._ready[0][1]].work_us if self._ready else 0.0
                start = self._dry(work_us)
                if start is not None:
                    index = start
                elif self._ready:
                    index = self._next()
                else:
                    self._stand()
                    return
            late_us, work_us = self._place(index)
            if late_us > 0.0:
                self._meeting = True
                self._walk.cards.work(self._rank, False)
                self._clock.at(self._clock.now_us + late_us, partial(self._met, index, work_us))
                return
            if work_us:
                self._work(index, work_us)
                return
            self._done(index)

    def _next(self) -> int:
        """Step 1: the next of the ops that are ready."""
        late: list[tuple[float, int]] = []
        while self._ready:
            entry = heapq.heappop(self._ready)
            if self._late_us(entry[1]) <= 0.0:
                break
            late.append(entry)
        else:
            entry = late.pop(0)
        for other in late:
            heapq.heappush(self._ready, other)
        return entry[1]

    def _late_us(self, index: int) -> float:
        """How long the lane would stand for the slowest rank of its place before this op."""
        landed_us = float("-inf")
        todo = [index]
        while todo:
            for needed in self.graph.before[todo.pop()]:
                if not self._placed[needed]:
                    todo.append(needed)
                    start = self.graph.nodes[needed].start
                    if self.graph.nodes[needed].role is Role.FINISH and start >= 0:
                        landed_us = max(landed_us, self._started[start].done_us)
        return self._apart.late_us(self._clock.now_us - landed_us)

    def _met(self, index: int, work_us: float) -> None:
        """The slowest rank of the place is there as well."""
        self._meeting = False
        if work_us:
            self._work(index, work_us)
        else:
            self._worked(index)

    def _work(self, index: int, work_us: float) -> None:
        self._walk.cards.work(self._rank, True)
        self._apart.work(work_us)
        self.lane.work(work_us, partial(self._worked, index))

    def _dry(self, work_us: float) -> int | None:
        """Steps 2 and 3."""
        for lane, starts in self._starts.items():
            if starts and self._free(lane) <= self._clock.now_us + AHEAD * work_us:
                idle = not self._ready and not self._flying[lane]
                if idle or not self._holds(lane, starts[0][1]):
                    return heapq.heappop(starts)[1]
        return None

    def _free(self, lane: str) -> float:
        return max(self._clock.now_us, self._free_us[lane]) if self._flying[lane] else self._clock.now_us

    def _holds(self, lane: str, index: int) -> bool:
        """Step 3: whether a more urgent start is worth waiting for."""
        if self._patience <= 0.0:
            return False
        nodes, now_us = self.graph.nodes, self._clock.now_us
        latest_us = self._free(lane) + self._patience * nodes[index].time_us
        for leads in self._whole.leads:
            lead = next((lead for lead in leads if lead.start not in self._started), None)
            if lead is None or nodes[lead.start].lane != lane or not self._missing[lead.start]:
                continue
            if self._urgency[lead.start] <= self._urgency[index]:
                continue
            when_us = now_us + sum(nodes[n].work_us for n in lead.work if not self._placed[n])
            for wait in lead.waits:
                if not self._exists[wait]:
                    under_way = nodes[wait].role is Role.FINISH and nodes[wait].start in self._started
                    when_us += self._free(lane) - now_us if under_way else float("inf")
            if when_us <= latest_us:
                return True
        return False

    def _stand(self) -> None:
        """Step 4; at the end, what nobody of this window reads is placed."""
        self._walk.cards.work(self._rank, False)
        rest = [index for index, placed in enumerate(self._placed) if not placed]
        if all(self._exists[index] for index in rest):
            for index in rest:
                self._place(index)
            self.end_us = self._clock.now_us

    def _place(self, index: int) -> tuple[float, float]:
        """Step 5: the node, behind all that it needs and that is not placed. Returns how long the lane stands
        for the slowest rank of its place, and their work, in microseconds."""
        work_us = late_us = 0.0
        todo = [index]
        while todo:
            needed = [n for n in self.graph.before[todo[-1]] if not self._placed[n]]
            if needed:
                todo += reversed(needed)
                continue
            at = todo.pop()
            if not self._placed[at]:
                self._placed[at] = True
                self.order.append(at)
                node = self.graph.nodes[at]
                work_us += node.work_us
                if node.role is Role.FINISH and node.start >= 0:
                    done_us = self._started[node.start].done_us
                    late_us += self._apart.meet(self._clock.now_us + late_us - done_us)
        return late_us, work_us

    def _done(self, index: int) -> None:
        """The node's work is done."""
        node = self.graph.nodes[index]
        microbatch = self._whole.microbatches[node.item.part]
        if node.role is Role.SEND and self._travels(int(node.item.ref)):
            self._walk.network.send(int(node.item.ref), microbatch)
        elif node.role is Role.START:
            self._start(index, microbatch)
        self._there(index)

    def _start(self, index: int, microbatch: int) -> None:
        node, call = self.graph.nodes[index], self._whole.calls[index]
        assert call is not None
        self._free_us[node.lane] = self._free(node.lane) + node.time_us
        self._flying[node.lane] += 1

        def landed() -> None:
            self._flying[node.lane] -= 1
            self._wake()

        self._started[index] = self._walk.collectives.start(call, self._rank, microbatch)
        self._started[index].done.then(landed)
