"""List scheduling over lanes, of a full step or of one window: always the most urgent op that can run now.

The order is legal, and the same for the same graph and urgencies.

    1. A send that can go, goes. Of the ops whose values exist the most urgent is next, but before those for
       which the lane would have to wait until the slowest rank of its pipeline rank has done its part of a
       collective; and before those that take more memory than is left.
    2. Before it, of the starts that can go, the most urgent for every lane that would run dry meanwhile. Not
       more: lanes keep their order, and something more urgent may be ready after the op.
    3. Not if a start that is more urgent could go soon after the lane is free: within `patience` times what
       the first would take. A lane that waits for a moment may be better than one that is taken.
    4. If there is nothing to do, the compute lane waits until something arrives. Starts that only a later
       window waits for go when nothing else is to come.
    5. Waits, views and ops that take little come directly before their first user (`order.rank_window`).

Source: list scheduling by critical path is Graham's and Hu's; the lanes are those of `docs/overlap.md`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import inf

from stretto.order.depend import Role
from stretto.order.rank_window import RankWindow, WindowMemory
from stretto.order.resources import WindowResources
from stretto.order.walk import LaneWalk

AHEAD = 1.25
"""A lane counts as running dry within this many times the next op's time: collectives may be faster than
predicted. Assumed."""


class ListScheduler(LaneWalk):
    """A compute lane whose next op is chosen when the lane is free."""

    def __init__(
        self,
        resources: WindowResources,
        rank: int,
        window: RankWindow,
        urgency: Sequence[float],
        patience: float = 0.0,
        memory: WindowMemory | None = None,
        limit_bytes: int = 0,
    ) -> None:
        """limit_bytes: of `memory`, if that is counted."""
        super().__init__(resources, rank, window, memory)
        self._limit_bytes = limit_bytes
        self._urgency = urgency
        self._patience = patience
        self._missing = list(window.count)
        self._exists = [False] * len(self.graph.nodes)
        self._to_come = sum(window.placed) + sum(window.waits)
        """Of waits and of what is placed by itself, how many do not exist yet."""
        self._sends: list[tuple[float, int]] = []
        self._starts: dict[str, list[tuple[float, int]]] = {}
        """Lane -> starts that can go: (-urgency, node)."""
        self._ready: list[tuple[float, int]] = []
        self._flying: dict[str, int] = defaultdict(int)
        self._free_us: dict[str, float] = defaultdict(float)
        """Lane -> about when it has done what is started."""

    def begin(self) -> None:
        # Those that can go at once; what they let go, they let go themselves.
        window = self.window
        for index in [n for n, missing in enumerate(self._missing) if not missing]:
            if window.placed[index] or window.waits[index]:
                self._can_go(index)
        super().begin()

    def _can_go(self, index: int) -> None:
        """All that a node needs is there."""
        if self.window.waits[index]:
            arrival = self._arrival(index)
            if arrival is None:
                self._there(index)
                return
            arrival.then(partial(self._arrives, index))
        elif self.graph.nodes[index].role is Role.SEND:
            heapq.heappush(self._sends, (-self._urgency[index], index))
        else:
            node = self.graph.nodes[index]
            queue = self._starts.setdefault(node.lane, []) if node.role is Role.START else self._ready
            heapq.heappush(queue, (-self._urgency[index], index))

    def _arrives(self, index: int) -> None:
        self._there(index)
        self._wake(index)

    def _there(self, index: int) -> None:
        """The node's value exists from now on."""
        self._exists[index] = True
        self._to_come -= 1
        missing = self._missing
        for user in self.window.after[index]:
            missing[user] -= 1
            if not missing[user]:
                self._can_go(user)

    def _go_on(self) -> None:
        placed, needs = self._placed, self.window.needs
        while True:
            if self._sends:
                index = heapq.heappop(self._sends)[1]
            elif self._ready:  # steps 1 to 3: the next of the ops that are ready, or a start before it
                start = self._dry(self.graph.nodes[self._ready[0][1]].work_us)
                index = self._soonest() if start is None else start
            elif (start := self._dry(0.0)) is not None or (start := self._last()) is not None:
                index = start
            else:
                self._stall()
                return
            # Step 5: the node, behind all that it needs and that is not placed.
            late_us, work_us = self._put([needed for needed in needs[index] if not placed[needed]])
            if (work_us or late_us) and self._busy(index, late_us, work_us):
                return
            self._done(index)

    def _soonest(self) -> int:
        """Step 1: not one for which the lane would wait, or that takes more memory than there is, if there is
        another. Of those that take more, the one after which least is left allocated."""
        aside: list[tuple[float, int]] = []
        while self._ready:
            entry = heapq.heappop(self._ready)
            if not self._over(entry[1]) and self._late_us(entry[1]) <= 0.0:
                break
            aside.append(entry)
        else:
            entry = min(aside, key=lambda one: (self._over(one[1]), one))
            aside.remove(entry)
        for other in aside:
            heapq.heappush(self._ready, other)
        return entry[1]

    def _over(self, index: int) -> int:
        """By how many bytes memory grows over the op, where that is more than is left; else 0."""
        memory = self.memory
        if memory is None or memory.now + self.window.most_bytes[index] <= self._limit_bytes:
            return 0
        return max(0, self.window.most_bytes[index] - memory.frees(index))

    def _late_us(self, index: int) -> float:
        """How long the lane would wait for the slowest rank of its pipeline rank before this op."""
        landed_us = -inf
        for needed in self.window.needs[index]:
            start = self.graph.nodes[needed].start
            if start >= 0 and not self._placed[needed]:
                landed_us = max(landed_us, self._started[start].us)
        return self._straggler.late_us(self._clock.now_us - landed_us)

    def _dry(self, work_us: float) -> int | None:
        """Steps 2 and 3, before the next op of so much work."""
        for lane, starts in self._starts.items():
            if starts and self._free(lane) <= self._clock.now_us + AHEAD * work_us:
                idle = not self._ready and not self._flying[lane]
                if idle or not self._worth_waiting(lane, starts[0][1]):
                    return heapq.heappop(starts)[1]
        return None

    def _last(self) -> int | None:
        """Step 4: the next start, where there are only starts to come."""
        starts = [lane for lane in self._starts.values() if lane]
        last = sum(map(len, starts)) == self._to_come
        return heapq.heappop(min(starts))[1] if starts and last else None

    def _free(self, lane: str) -> float:
        return max(self._clock.now_us, self._free_us[lane]) if self._flying[lane] else self._clock.now_us

    def _worth_waiting(self, lane: str, index: int) -> bool:
        """Step 3: whether a more urgent start is worth waiting for."""
        if self._patience <= 0.0:
            return False
        nodes, now_us = self.graph.nodes, self._clock.now_us
        latest_us = self._free(lane) + self._patience * nodes[index].time_us
        for leads in self.window.leads:
            lead = next((lead for lead in leads if lead.start not in self._started), None)
            if lead is None or nodes[lead.start].lane != lane or not self._missing[lead.start]:
                continue
            if self._urgency[lead.start] <= self._urgency[index]:
                continue
            when_us = now_us + sum(nodes[n].work_us for n in lead.work if not self._placed[n])
            for wait in lead.waits:
                if not self._exists[wait]:
                    under_way = nodes[wait].role is Role.FINISH and nodes[wait].start in self._started
                    when_us += self._free(lane) - now_us if under_way else inf
            if when_us <= latest_us:
                return True
        return False

    def _stall(self) -> None:
        """Step 4; at the end, what no one of this window reads is placed."""
        self._waits_now()
        if not self._to_come and not self.end_us:
            self._put([index for index, placed in enumerate(self._placed) if not placed])
            self.end_us = self._clock.now_us

    def _done(self, index: int) -> None:
        super()._done(index)
        if index in self._started:
            node = self.graph.nodes[index]
            self._free_us[node.lane] = self._free(node.lane) + node.time_us
            if not self._started[index].happened:
                self._flying[node.lane] += 1
                self._started[index].then(partial(self._landed, index))
        self._there(index)

    def _landed(self, index: int) -> None:
        """A lane has done what a node started."""
        self._flying[self.graph.nodes[index].lane] -= 1
        self._wake(index)
