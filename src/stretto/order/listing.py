"""List scheduling over lanes: always the most urgent op that can run now, communications as early as can be.

The contract: a legal order, the same for the same graph and urgencies. It keeps `limit_bytes` wherever
something else than what would exceed it can run.

    1. How urgent a node is: the longest path from it to the window's end, through lanes as well as compute
       (critical path), or to the end of what must follow a message. What nothing waits for, as weight
       gradients, is the least urgent and fills gaps.
    2. A send that can go, goes, and so does a gradient's sum. Of the ops whose values are there at this time
       the most urgent is next. With `fit`, if something more urgent arrives soon, one that is done by then is
       preferred: the longest.
    3. Before it, of the starts that can go, the most urgent for every lane that would run dry meanwhile.
       Not more: lanes keep their order, and something more urgent may be ready after the op. Where
       `sequence` gives a lane's order, each start goes as soon as it is the next of it.
       An op that is `held` for a start is not there before it: it is kept to fill a later gap. Where the
       limit allows nothing else, nothing is held any more.
    4. If there is no op, the compute lane stands until the next collective or message arrives.
    5. Waits and views have no place of their own: they stand directly before their first user, so that what
       arrives later than predicted stops the lane as late as possible.

Source: list scheduling by critical path is Graham's and Hu's; the lanes are those of `docs/overlap.md`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

from stretto.order.depend import Role, WindowGraph
from stretto.order.replay import Lanes, Memory, replay


def urgencies(graph: WindowGraph) -> list[float]:
    """Step 1, in microseconds by node."""
    found = [0.0] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        behind = max((found[n] for n in graph.after[index]), default=0.0)
        # What only a later window waits for is in no hurry.
        leads = node.role in (Role.SEND, Role.SUM) or (node.role is Role.START and graph.after[index])
        on_lane_us = max(node.time_us, node.tail_us) if leads else 0.0
        found[index] = max(node.work_us, on_lane_us) + behind
    return found


def captured_limit(graph: WindowGraph) -> int:
    """The bytes that the captured order needs, one part after the other: what an order may use as well."""
    return replay(graph, range(len(graph.nodes))).peak_bytes


def list_order(
    graph: WindowGraph,
    *,
    urgency: Sequence[float] | None = None,
    fit: bool = False,
    limit_bytes: int | None = None,
    sequence: Sequence[int] | None = None,
    held: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """An order of the graph's nodes.

    urgency: by node; the critical path without it. fit: see step 3. limit_bytes: above what is held at the
    window's begin; what the captured order needs without it. sequence: all starts, in an order that does not
    go against what they need. held: op -> the start before which it does not run; no start needs such an op.
    """
    if limit_bytes is None:
        limit_bytes = captured_limit(graph)
    urgency = urgencies(graph) if urgency is None else urgency
    return _Listing(graph, urgency, fit, limit_bytes, sequence, held or {}).order()


AHEAD = 1.25
"""A lane counts as running dry within this many times the next op's time: collectives may be faster than
predicted. Assumed."""


class _Listing:
    def __init__(
        self,
        graph: WindowGraph,
        urgency: Sequence[float],
        fit: bool,
        limit_bytes: int,
        sequence: Sequence[int] | None,
        held: Mapping[int, int],
    ) -> None:
        self.graph = graph
        self.urgency = urgency
        self.fit = fit
        self.limit_bytes = limit_bytes
        self.held = held
        self.kept: dict[int, list[int]] = {}
        """Start -> ops that could run, and are held for it."""
        self.now_us = 0.0
        self.lanes = Lanes()
        self.memory = Memory(graph)
        self.missing = [len(needs) for needs in graph.before]
        self.done: dict[int, float] = {}
        self.order_: list[int] = []
        self.placed = [False] * len(graph.nodes)
        self.sends: list[tuple[float, int]] = []
        self.starts: dict[str, list[tuple[float, int]]] = {}
        """Lane -> starts that can go: (-urgency, node)."""
        self.queues: dict[str, deque[int]] | None = None
        """Lane -> starts that are still to go, where their order is given."""
        if sequence is not None:
            self.queues = {}
            for index in sequence:
                self.queues.setdefault(graph.nodes[index].lane, deque()).append(index)
        self.waiting: set[int] = set()
        """Starts that can go but for their place in the queue."""
        self.ready: list[tuple[float, int]] = []
        """Ops that can run: (-urgency, node)."""
        self.arriving: list[tuple[float, int]] = []
        """What is under way: (when it is there, node)."""

    def order(self) -> tuple[int, ...]:
        # Those that can go at once; what they let go, they let go themselves.
        for index in [n for n, missing in enumerate(self.missing) if not missing]:
            self._can_go(index)
        while True:
            while self.arriving and self.arriving[0][0] <= self.now_us:
                self._there(heapq.heappop(self.arriving)[1])
            if self.sends:
                self._run(heapq.heappop(self.sends)[1])
            elif self.ready:
                chosen = self._choose()
                start = self._dry(self.graph.nodes[chosen].work_us)
                if start is not None:
                    heapq.heappush(self.ready, (-self.urgency[chosen], chosen))
                    chosen = start
                self._run(chosen)
            elif (start := self._dry(0.0)) is not None:
                self._run(start)
            elif self.arriving or any(self.starts.values()):
                times = [self.lanes.free_us(lane) for lane, starts in self.starts.items() if starts]
                self.now_us = min(times + [when for when, _ in self.arriving[:1]])
            elif self.kept:
                self._let_go()
            else:
                break
        for index in range(len(self.graph.nodes)):
            self._place(index)  # what only later windows read
        return tuple(self.order_)

    def _can_go(self, index: int) -> None:
        """All that the node needs is there, or is waited for behind it."""
        node = self.graph.nodes[index]
        if node.role is Role.FINISH or node.role is Role.RECEIVE:
            when = self.done[node.start] if node.start >= 0 else node.time_us
            heapq.heappush(self.arriving, (when, index))
        elif node.lazy:
            self._there(index)
        else:
            self._queue(index)

    def _queue(self, index: int) -> None:
        node = self.graph.nodes[index]
        if node.role is Role.START and self.queues is not None:
            self.waiting.add(index)
        elif node.role is Role.SEND or node.role is Role.SUM:
            heapq.heappush(self.sends, (-self.urgency[index], index))
        elif index in self.held and not self.placed[self.held[index]]:
            self.kept.setdefault(self.held[index], []).append(index)
        else:
            queue = self.starts.setdefault(node.lane, []) if node.role is Role.START else self.ready
            heapq.heappush(queue, (-self.urgency[index], index))

    def _dry(self, work_us: float) -> int | None:
        """Step 3: a start for a lane that has nothing left to do before that much work is done."""
        if self.queues is not None:
            for queue in self.queues.values():
                if queue and queue[0] in self.waiting:
                    return queue.popleft()
            return None
        for lane, starts in self.starts.items():
            if starts and self.lanes.free_us(lane) <= self.now_us + AHEAD * work_us:
                return heapq.heappop(starts)[1]
        return None

    def _there(self, index: int) -> None:
        """The node's value exists from now on."""
        for user in self.graph.after[index]:
            self.missing[user] -= 1
            if not self.missing[user]:
                self._can_go(user)

    def _run(self, index: int) -> None:
        node = self.graph.nodes[index]
        self._place(index)
        if node.role is Role.START or node.role is Role.SUM:
            self.done[index] = self.lanes.start(node.lane, self.now_us, node.time_us, node.load)
            for kept in self.kept.pop(index, ()):
                heapq.heappush(self.ready, (-self.urgency[kept], kept))
        if node.work_us:
            self.now_us = self.lanes.work(self.now_us, node.work_us)
        self._there(index)

    def _let_go(self) -> None:
        """Nothing is held any more."""
        for kept in (index for held in self.kept.values() for index in held):
            heapq.heappush(self.ready, (-self.urgency[kept], kept))
        self.kept = {}
        self.held = {}

    def _place(self, index: int) -> None:
        """Step 5: the node, behind the waits and views that it needs."""
        if self.placed[index]:
            return
        nodes = self.graph.nodes
        todo = [index]
        while todo:
            at = todo[-1]
            needed = [n for n in self.graph.before[at] if not self.placed[n]]
            if needed:
                todo += reversed(needed)
                continue
            todo.pop()
            if not self.placed[at]:
                self.placed[at] = True
                self.order_.append(at)
                self.memory.take(at)
                if at != index and nodes[at].work_us:
                    self.now_us = self.lanes.work(self.now_us, nodes[at].work_us)

    def _choose(self) -> int:
        """Step 3, under the memory limit."""
        best = heapq.heappop(self.ready)
        set_aside: list[tuple[float, int]] = []
        over = best
        while self.memory.needs(best[1]) > self.limit_bytes and self.memory.grows(best[1]) > 0:
            set_aside.append(best)
            if self.memory.grows(best[1]) < self.memory.grows(over[1]):
                over = best
            if not self.ready:
                self._let_go()
            if not self.ready:
                set_aside.remove(over)
                best = over
                break
            best = heapq.heappop(self.ready)
        if self.fit and self.arriving:
            best = self._fitting(best)
        for other in set_aside:
            heapq.heappush(self.ready, other)
        return best[1]

    def _fitting(self, best: tuple[float, int]) -> tuple[float, int]:
        """The op itself, or one that is done before something more urgent arrives."""
        when, arrives = self.arriving[0]
        if self.urgency[arrives] <= -best[0]:
            return best
        nodes = self.graph.nodes
        gap_us = when - self.now_us
        if nodes[best[1]].work_us <= gap_us:
            return best
        fits = [
            entry
            for entry in self.ready
            if 0.0 < nodes[entry[1]].work_us <= gap_us and self.memory.needs(entry[1]) <= self.limit_bytes
        ]
        if not fits:
            return best
        found = max(fits, key=lambda entry: (nodes[entry[1]].work_us, -entry[0], -entry[1]))
        self.ready.remove(found)
        heapq.heapify(self.ready)
        heapq.heappush(self.ready, best)
        return found
