"""One window by itself, listed: how urgent its nodes are, and what a search can ask beside.

    1. Where `sequence` gives a lane's order, each start goes as soon as it is the next of it. An op that is
       `held` for a start is not there before it: it is kept to fill a later gap.
    2. The memory limit is kept wherever something else than what would exceed it can run. Where it allows
       nothing else, nothing is held any more.
    3. With `fit`, if something more urgent arrives soon, one that is done by then is preferred: the longest.

May touch this room.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

from stretto.order.depend import Role, WindowGraph
from stretto.order.follow import replay
from stretto.order.listing import Listing
from stretto.order.scope import Whole, make_whole
from stretto.order.storages import Memory
from stretto.order.walk import Rank, walk
from stretto.order.worlds import WindowWorld


def urgencies(graph: WindowGraph) -> list[float]:
    """How urgent nodes of one window are, in microseconds: the longest path to its end, through lanes as well
    as compute (critical path), or to the end of what must follow a message. What nothing waits for, as weight
    gradients, is the least urgent and fills gaps."""
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

    urgency: by node; `urgencies` without it. fit: see step 3. limit_bytes: above what is held at the
    window's begin; what the captured order needs without it. sequence: all starts, in an order that does not
    go against what they need. held: op -> the start before which it does not run; no start needs such an op.
    """
    if limit_bytes is None:
        limit_bytes = captured_limit(graph)
    urgency = urgencies(graph) if urgency is None else urgency
    made = list_window(make_whole(graph), urgency, fit, limit_bytes, sequence, held or {})
    return tuple(made.order)


def list_window(
    whole: Whole,
    urgency: Sequence[float],
    fit: bool,
    limit_bytes: int,
    sequence: Sequence[int] | None,
    held: Mapping[int, int],
    most_us: float = float("inf"),
) -> Rank:
    """A window by itself, walked to its end. Arguments as in `list_order`.

    Raises TooLongError once it is known that the window takes longer than most_us.
    """
    world = WindowWorld(whole.graph)
    rank = _Window(world, whole, urgency, fit, limit_bytes, sequence, held)
    rank.last_us = most_us * (1.0 + 1e-9) - whole.graph.work_us  # sums of floats in another order
    made = walk(world, [rank])
    assert made is not None, "a window by itself comes to its end"
    return rank


class TooLongError(Exception):
    """A walk was given up."""


class _Window(Listing):
    """last_us: the most that the lane may have waited when it goes on."""

    last_us: float

    def __init__(
        self,
        world: WindowWorld,
        whole: Whole,
        urgency: Sequence[float],
        fit: bool,
        limit_bytes: int,
        sequence: Sequence[int] | None,
        held: Mapping[int, int],
    ) -> None:
        self._memory = whole.memory.empty()
        super().__init__(world, 0, whole, urgency, memory=self._memory)
        self._limit_bytes = limit_bytes
        self._fit = fit
        self._held = held
        self._kept: dict[int, list[int]] = {}
        """Start -> ops that could run, and are held for it."""
        self._arriving: list[tuple[float, int]] = []
        """With `fit`: (when it is there, node)."""
        self._waiting: set[int] = set()
        """Starts that can go but for their place in the queue."""
        self._queues: dict[str, deque[int]] | None = None
        """Lane -> starts that are still to go, where their order is given."""
        if sequence is not None:
            self._queues = {}
            for index in sequence:
                self._queues.setdefault(whole.graph.nodes[index].lane, deque()).append(index)

    def _resume(self) -> None:
        if self._clock.now_us - self._work_us > self.last_us:
            raise TooLongError
        super()._resume()

    # --- what can go ----------------------------------------------------------------------------------

    def _awaits(self, index: int) -> None:
        if self._fit:
            node = self.graph.nodes[index]
            when_us = self._started[node.start].done_us if node.start >= 0 else node.time_us
            heapq.heappush(self._arriving, (when_us, index))

    def _queue(self, index: int) -> None:
        """Step 1."""
        if self._queues is not None and self.graph.nodes[index].role is Role.START:
            self._waiting.add(index)
        elif index in self._held and not self._placed[self._held[index]]:
            self._kept.setdefault(self._held[index], []).append(index)
        else:
            super()._queue(index)

    def _launched(self, index: int) -> None:
        for kept in self._kept.pop(index, ()):
            heapq.heappush(self._ready, (-self._urgency[kept], kept))

    def _let_go(self) -> bool:
        """Nothing is held any more, if nothing else is under way."""
        return bool(self._kept) and not self._coming and self._release()

    def _release(self) -> bool:
        for kept in (index for held in self._kept.values() for index in held):
            heapq.heappush(self._ready, (-self._urgency[kept], kept))
        self._kept, self._held = {}, {}
        return True

    # --- what is next ---------------------------------------------------------------------------------

    def _chosen(self) -> int:
        best = self._fits_memory(self._memory)
        chosen = (self._fitting(best, self._memory) if self._fit else best)[1]
        start = self._dry(self.graph.nodes[chosen].work_us, others=True)
        if start is None:
            return chosen
        heapq.heappush(self._ready, (-self._urgency[chosen], chosen))
        return start

    def _dry(self, work_us: float, others: bool = False) -> int | None:
        if self._queues is None:
            return super()._dry(work_us, others)
        if self._waiting:
            for queue in self._queues.values():
                if queue and queue[0] in self._waiting:
                    self._waiting.remove(queue[0])
                    return queue.popleft()
        return None

    def _fits_memory(self, memory: Memory) -> tuple[float, int]:
        best = heapq.heappop(self._ready)
        set_aside: list[tuple[float, int]] = []
        over = best
        while memory.needs(best[1]) > self._limit_bytes and memory.grows(best[1]) > 0:
            set_aside.append(best)
            if memory.grows(best[1]) < memory.grows(over[1]):
                over = best
            if not self._ready:
                self._release()
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
            if 0.0 < nodes[entry[1]].work_us <= gap_us and memory.needs(entry[1]) <= self._limit_bytes
        ]
        if not fits:
            return best
        found = max(fits, key=lambda entry: (nodes[entry[1]].work_us, -entry[0], -entry[1]))
        self._ready.remove(found)
        heapq.heapify(self._ready)
        heapq.heappush(self._ready, best)
        return found
