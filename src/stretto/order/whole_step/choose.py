"""All ranks of a step walked at once, each op chosen when its lane is free: orders of windows come out of it.

For steps in which each rank has one window. Where a window ordered by itself must be told when messages
arrive, here they arrive when the other rank has sent them. The contract:

1. A send that can go, goes; one that is paired, when its partner can go as well (`together.pairs`). Of the
   ops whose values are there the most urgent is next, but before those for which the lane would have to stand
   until the slowest rank of its place has done its part of a collective.
2. Before it, the most urgent start of every lane that would run dry meanwhile; lanes keep their order.
3. Not if a start that is more urgent could be made soon after the lane is free: within `patience` times what
   the first would take. A lane that stands for a moment may be better than one that is taken.
4. If there is nothing to do, the compute lane stands until something arrives.
5. Waits, views and ops that take little stand directly before their first user.

May touch `stretto.ir`, `stretto.schedule`, `stretto.simulate` and this room.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from stretto.ir.plan import Plan
from stretto.order import Role
from stretto.order.listing import AHEAD
from stretto.order.whole_step.pairs import Borders, Meetings
from stretto.order.whole_step.rank_step import Whole
from stretto.order.whole_step.walk import Chosen, Rank, Walk
from stretto.simulate.clock import Moment


def choose(
    plan: Plan,
    wholes: Sequence[Whole],
    urgencies: Sequence[Sequence[float]],
    patience: Sequence[float],
    pairs: Borders = (),
) -> Chosen | None:
    """Walk the step; None when ranks stand for ever.

    wholes, urgencies, patience: by rank, its window, how urgent its nodes are, and step 3. pairs: messages
    that leave together.
    """
    walk = Walk(plan)
    meetings = Meetings(pairs, walk.clock)
    return walk.run(lambda rank: _Rank(walk, rank, wholes[rank], urgencies[rank], patience[rank], meetings))


class _Rank(Rank):
    """One rank's compute lane, and what it knows of its others."""

    def __init__(
        self,
        walk: Walk,
        rank: int,
        whole: Whole,
        urgency: Sequence[float],
        patience: float,
        meetings: Meetings,
    ) -> None:
        super().__init__(walk, rank, whole)
        self._meetings = meetings
        self._urgency = urgency
        self._patience = patience
        self._missing = list(whole.count)
        self._exists = [False] * len(self.graph.nodes)
        self._to_come = sum(whole.named) + sum(whole.waits)
        """Of waits and of what stands for itself, how many do not exist yet."""
        self._sends: list[tuple[float, int]] = []
        self._starts: dict[str, list[tuple[float, int]]] = {}
        """Lane -> starts that can go: (-urgency, node)."""
        self._ready: list[tuple[float, int]] = []
        self._flying: dict[str, int] = defaultdict(int)
        self._free_us: dict[str, float] = defaultdict(float)
        """Lane -> about when it has done what is started."""

    def begin(self) -> None:
        # Those that can go at once; what they let go, they let go themselves.
        whole = self._whole
        for index in [n for n, missing in enumerate(self._missing) if not missing]:
            if whole.named[index] or whole.waits[index]:
                self._can_go(index)
        super().begin()

    # --- what can go ----------------------------------------------------------------------------------

    def _can_go(self, index: int) -> None:
        """All that a node needs is there."""
        node = self.graph.nodes[index]
        entry = -self._urgency[index], index
        if node.role is Role.FINISH and node.start >= 0:
            self._when(self._started[node.start].done, index)
        elif node.role is Role.RECEIVE and self._travels(node):
            self._when(self._message(node).arrived, index)
        elif self._whole.waits[index]:
            self._there(index)
        elif node.role is Role.SEND:
            message = int(node.item.ref), self._whole.microbatches[node.item.part]
            if self._meetings.meet(message, partial(self._met_partner, index)):
                heapq.heappush(self._sends, entry)
        elif node.role is Role.START:
            heapq.heappush(self._starts.setdefault(node.lane, []), entry)
        else:
            heapq.heappush(self._ready, entry)

    def _met_partner(self, index: int) -> None:
        heapq.heappush(self._sends, (-self._urgency[index], index))
        self._wake(index)

    def _when(self, moment: Moment, index: int) -> None:
        def arrive() -> None:
            self._there(index)
            self._wake(index)

        if moment.happened:
            self._there(index)
        else:
            moment.then(arrive)

    def _there(self, index: int) -> None:
        """The node's value exists from now on."""
        self._exists[index] = True
        self._to_come -= 1
        for user in self._whole.after[index]:
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
            if self._busy(index, *self._put(self._needed(index))):
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
        for needed in self._whole.needs[index]:
            start = self.graph.nodes[needed].start
            if start >= 0 and not self._placed[needed]:
                landed_us = max(landed_us, self._started[start].done_us)
        return self._straggler.late_us(self._clock.now_us - landed_us)

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
        self._stands()
        if not self._to_come:
            self._put([index for index, placed in enumerate(self._placed) if not placed])
            self.end_us = self._clock.now_us

    def _needed(self, index: int) -> list[int]:
        """Step 5: the node, behind all that it needs and that is not placed."""
        placed = self._placed
        return [needed for needed in self._whole.needs[index] if not placed[needed]]

    def _done(self, index: int) -> None:
        super()._done(index)
        node = self.graph.nodes[index]
        if node.role is Role.START:
            self._take(index, node.lane, node.time_us)
        self._there(index)

    def _take(self, index: int, lane: str, time_us: float) -> None:
        """A start has taken its lane."""
        self._free_us[lane] = self._free(lane) + time_us
        self._flying[lane] += 1

        def landed() -> None:
            self._flying[lane] -= 1
            self._wake(index)

        self._started[index].done.then(landed)
