"""List scheduling over lanes, of a whole step or of one window: always the most urgent op that can run now.

The contract: a legal order, the same for the same graph and urgencies. It keeps `limit_bytes` wherever
something else than what would exceed it can run.

    1. A send that can go, goes; one that is paired, when its partner can go as well (`whole_step.pairs`).
       Of the ops whose values are there the most urgent is next, but before those for which the lane would
       have to wait until the slowest rank of its place has done its part of a collective. With `fit`, if
       something more urgent arrives soon, one that is done by then is preferred: the longest.
    2. Before it, of the starts that can go, the most urgent for every lane that would run dry meanwhile. Not
       more: lanes keep their order, and something more urgent may be ready after the op. Where `sequence`
       gives a lane's order, each start goes as soon as it is the next of it. An op that is `held` for a start
       is not there before it: it is kept to fill a later gap. Where the limit allows nothing else, nothing is
       held any more.
    3. Not if a start that is more urgent could be made soon after the lane is free: within `patience` times
       what the first would take. A lane that waits for a moment may be better than one that is taken.
    4. If there is nothing to do, the compute lane waits until something arrives.
    5. Waits, views and ops that take little are placed directly before their first user (`order.scope`).

Source: list scheduling by critical path is Graham's and Hu's; the lanes are those of `docs/overlap.md`. May
touch this room.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from stretto.order.depend import Role
from stretto.order.scope import Whole
from stretto.order.storages import Memory
from stretto.order.walk import Rank
from stretto.order.worlds import World

AHEAD = 1.25
"""A lane counts as running dry within this many times the next op's time: collectives may be faster than
predicted. Assumed."""

Meet = Callable[[tuple[int, int], Callable[[], None]], bool]
"""A message, (edge, microbatch), can go: whether it goes at once; else the function is called later."""


class Listing(Rank):
    """One rank's compute lane, whose ops are chosen as they come. The fields without a `_` are for
    `order.window`: `queues` has by lane the starts that are still to go, where their order is given."""

    def __init__(
        self,
        world: World,
        rank: int,
        whole: Whole,
        urgency: Sequence[float],
        patience: float = 0.0,
        meet: Meet | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__(world, rank, whole, memory)
        self.limit_bytes = 0
        self.fit = False
        self.held: Mapping[int, int] = {}
        self.queues: dict[str, deque[int]] | None = None
        self._meet = meet
        self._urgency = urgency
        self._patience = patience
        self._missing = list(whole.count)
        self._exists = [False] * len(self.graph.nodes)
        self._to_come = sum(whole.named) + sum(whole.waits)
        """Of waits and of what stands for itself, how many do not exist yet."""
        self._coming = 0
        """What is under way: it will wake the lane."""
        self._sends: list[tuple[float, int]] = []
        self._starts: dict[str, list[tuple[float, int]]] = {}
        """Lane -> starts that can go: (-urgency, node)."""
        self._waiting: set[int] = set()
        """Starts that can go but for their place in the queue."""
        self._ready: list[tuple[float, int]] = []
        self._kept: dict[int, list[int]] = {}
        """Start -> ops that could run, and are held for it."""
        self._arriving: list[tuple[float, int]] = []
        """With `fit`: (when it is there, node)."""
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
        if self._whole.waits[index]:
            arrival = self._arrival(index)
            if arrival is None:
                self._there(index)
                return
            self._coming += 1
            arrival.then(partial(self._arrives, index))
            if self.fit:
                when_us = self._started[node.start].done_us if node.start >= 0 else node.time_us
                heapq.heappush(self._arriving, (when_us, index))
        elif node.role is Role.SEND:
            message = int(node.item.ref), self._microbatch(node)
            if self._meet is None or self._meet(message, partial(self._met_partner, index)):
                heapq.heappush(self._sends, entry)
        elif node.role is Role.START and self.queues is not None:
            self._waiting.add(index)
        elif node.role is Role.START:
            heapq.heappush(self._starts.setdefault(node.lane, []), entry)
        elif index in self.held and not self._placed[self.held[index]]:
            self._kept.setdefault(self.held[index], []).append(index)
        else:
            heapq.heappush(self._ready, entry)

    def _arrives(self, index: int) -> None:
        self._coming -= 1
        self._there(index)
        self._wake(index)

    def _met_partner(self, index: int) -> None:
        heapq.heappush(self._sends, (-self._urgency[index], index))
        self._wake(index)

    def _there(self, index: int) -> None:
        """The node's value exists from now on."""
        self._exists[index] = True
        self._to_come -= 1
        missing = self._missing
        for user in self._whole.after[index]:
            missing[user] -= 1
            if not missing[user]:
                self._can_go(user)

    def _let_go(self, start: int | None = None) -> None:
        """What is held for a start can run; all that is held, without one."""
        for one in (start,) if start is not None else tuple(self._kept):
            for kept in self._kept.pop(one, ()):
                heapq.heappush(self._ready, (-self._urgency[kept], kept))
        if start is None:
            self.held = {}

    # --- steps 1 to 5 ---------------------------------------------------------------------------------

    def _go_on(self) -> None:
        placed, needs = self._placed, self._whole.needs
        while True:
            if self._sends:
                index = heapq.heappop(self._sends)[1]
            elif self._ready:
                index = self._chosen()
            elif (start := self._dry(0.0)) is not None:
                index = start
            elif self._kept and not self._coming:
                self._let_go()
                continue
            else:
                self._stand()
                return
            # Step 5: the node, behind all that it needs and that is not placed.
            late_us, work_us = self._put([needed for needed in needs[index] if not placed[needed]])
            if (work_us or late_us) and self._busy(index, late_us, work_us):
                return
            self._done(index)

    def _chosen(self) -> int:
        """Steps 1 to 3: the next of the ops that are ready, or a start before it."""
        nodes = self.graph.nodes
        if self.memory is None:
            start = self._dry(nodes[self._ready[0][1]].work_us)
            return self._soonest() if start is None else start
        chosen = self._choose(self.memory)
        start = self._dry(nodes[chosen].work_us, others=True)
        if start is None:
            return chosen
        heapq.heappush(self._ready, (-self._urgency[chosen], chosen))
        return start

    def _choose(self, memory: Memory) -> int:
        """Step 1 under a memory limit."""
        best = self._fits_memory(memory)
        return (self._fitting(best, memory) if self.fit else best)[1]

    def _soonest(self) -> int:
        """Step 1: not one for which the lane would wait, if there is another."""
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
        """How long the lane would wait for the slowest rank of its place before this op."""
        landed_us = float("-inf")
        for needed in self._whole.needs[index]:
            start = self.graph.nodes[needed].start
            if start >= 0 and not self._placed[needed]:
                landed_us = max(landed_us, self._started[start].done_us)
        return self._straggler.late_us(self._clock.now_us - landed_us)

    def _fits_memory(self, memory: Memory) -> tuple[float, int]:
        best = heapq.heappop(self._ready)
        set_aside: list[tuple[float, int]] = []
        over = best
        while memory.needs(best[1]) > self.limit_bytes and memory.grows(best[1]) > 0:
            set_aside.append(best)
            if memory.grows(best[1]) < memory.grows(over[1]):
                over = best
            if not self._ready:
                self._let_go()
            if not self._ready:
                set_aside.remove(over)
                best = over
                break
            best = heapq.heappop(self._ready)
        for other in set_aside:
            heapq.heappush(self._ready, other)
        return best

    def _fitting(self, best: tuple[float, int], memory: Memory) -> tuple[float, int]:
        """The op itself, or one that is done before something more urgent arrives."""
        while self._arriving and self._exists[self._arriving[0][1]]:
            heapq.heappop(self._arriving)
        if not self._arriving or self._urgency[self._arriving[0][1]] <= -best[0]:
            return best
        nodes = self.graph.nodes
        gap_us = self._arriving[0][0] - self._clock.now_us
        if nodes[best[1]].work_us <= gap_us:
            return best
        fits = [
            entry
            for entry in self._ready
            if 0.0 < nodes[entry[1]].work_us <= gap_us and memory.needs(entry[1]) <= self.limit_bytes
        ]
        if not fits:
            return best
        found = max(fits, key=lambda entry: (nodes[entry[1]].work_us, -entry[0], -entry[1]))
        self._ready.remove(found)
        heapq.heapify(self._ready)
        heapq.heappush(self._ready, best)
        return found

    def _dry(self, work_us: float, others: bool = False) -> int | None:
        """Steps 2 and 3, before the next op of so much work. others: there is one, beside those ready."""
        if self.queues is not None:
            if self._waiting:
                for queue in self.queues.values():
                    if queue and queue[0] in self._waiting:
                        self._waiting.remove(queue[0])
                        return queue.popleft()
            return None
        for lane, starts in self._starts.items():
            if starts and self._free(lane) <= self._clock.now_us + AHEAD * work_us:
                idle = not others and not self._ready and not self._flying[lane]
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
        self._waits_now()
        if not self._to_come and not self.end_us:
            self._put([index for index, placed in enumerate(self._placed) if not placed])
            self.end_us = self._clock.now_us

    def _done(self, index: int) -> None:
        super()._done(index)
        if index in self._started:
            node = self.graph.nodes[index]
            self._free_us[node.lane] = self._free(node.lane) + node.time_us
            if not self._started[index].done.happened:
                self._flying[node.lane] += 1
                self._coming += 1
                self._started[index].done.then(partial(self._landed, index))
            if self._kept:
                self._let_go(index)
        self._there(index)

    def _landed(self, index: int) -> None:
        """A lane has done what a node started."""
        self._flying[self.graph.nodes[index].lane] -= 1
        self._coming -= 1
        self._wake(index)
