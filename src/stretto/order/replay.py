"""A fast clock for one window: how long an order takes, how long compute stands, what memory it needs.

It knows what `stretto.simulate` knows of a window by itself: the compute lane takes items one after another;
each collective goes to the lane of its axis as its start begins; the lane carries one at a time; while
collectives take a share of the processor, compute goes slower by that share; a wait stands also for the
slowest rank of the place. It knows nothing of other places, of messages but when they are expected, and of
what came before the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stretto.order.depend import Role, WindowGraph
from stretto.simulate.straggler import Straggler


@dataclass(frozen=True, slots=True)
class Replay:
    """end_us: when the window has ended; stands_us: of that, what the compute lane waited; peak_bytes: the
    most that it held, above what it held at its begin.

    late_us: when the window, what must follow its messages (`Node.tail_us`) and the sums that it starts have
    ended; never before `end_us`. reached_us: by RECEIVE, when the lane came to it.
    """

    end_us: float
    stands_us: float
    peak_bytes: int
    late_us: float
    reached_us: Mapping[int, float] = field(repr=False)


class Lanes:
    """The lanes of collectives, while a window's time goes on."""

    __slots__ = ("_flights", "_free")

    def __init__(self) -> None:
        self._free: dict[str, float] = {}
        self._flights: list[tuple[float, float, float]] = []
        """(begin, end, load) of those that slow compute down."""

    def start(self, lane: str, now_us: float, time_us: float, load: float) -> float:
        """A collective is started now; when it is done."""
        begin = max(now_us, self._free.get(lane, 0.0))
        end = begin + time_us
        self._free[lane] = end
        if load > 0.0 and time_us > 0.0:
            self._flights.append((begin, end, load))
        return end

    def free_us(self, lane: str) -> float:
        """When the lane has done all that was started so far."""
        return self._free.get(lane, 0.0)

    def work(self, now_us: float, work_us: float) -> float:
        """When work on the compute lane that begins now is done."""
        flights = self._flights
        while flights and flights[0][1] <= now_us:
            flights.pop(0)
        if not flights:
            return now_us + work_us
        left = work_us
        while left > 0.0:
            speed, until = 1.0, float("inf")
            for begin, end, load in flights:
                if begin > now_us:
                    until = min(until, begin)
                elif end > now_us:
                    speed -= load
                    until = min(until, end)
            if until == float("inf"):
                return now_us + left
            if speed > 1e-9:
                done_us = now_us + left / speed
                if done_us <= until:
                    return done_us
                left -= (until - now_us) * speed
            now_us = until
        return now_us


def replay(graph: WindowGraph, order: Sequence[int]) -> Replay:
    """Walk a legal order of the graph's nodes."""
    lanes = Lanes()
    done: dict[int, float] = {}
    reached_us: dict[int, float] = {}
    now_us = stands_us = late_us = 0.0
    straggler = Straggler(graph.skew)
    memory = Memory(graph)
    for index in order:
        node = graph.nodes[index]
        if node.role is Role.RECEIVE:
            reached_us[index] = now_us
        elif node.role is Role.SEND:
            late_us = max(late_us, now_us + node.tail_us)
        if node.role is Role.FINISH or node.role is Role.RECEIVE:
            ready_us = done[node.start] if node.start >= 0 else node.time_us
            if ready_us > now_us:
                stands_us += ready_us - now_us
                now_us = ready_us
            if node.role is Role.FINISH:
                met_us = straggler.meet(now_us - ready_us)
                stands_us += met_us
                now_us += met_us
        if node.role is Role.START or node.role is Role.SUM:
            done[index] = lanes.start(node.lane, now_us, node.time_us, node.load)
        if node.role is Role.SUM:
            late_us = max(late_us, done[index])
        if node.work_us:
            now_us = lanes.work(now_us, node.work_us)
            straggler.work(node.work_us)
        memory.take(index)
    return Replay(now_us, stands_us, memory.peak, max(now_us, late_us), reached_us)


class Memory:
    """Bytes that a window holds above what it held at its begin, item by item."""

    __slots__ = ("_allocates", "_left", "_touches", "held", "peak")

    def __init__(self, graph: WindowGraph) -> None:
        self.held = 0
        self.peak = 0
        self._allocates = [0] * len(graph.nodes)
        self._touches: list[list[int]] = [[] for _ in graph.nodes]
        self._left: list[tuple[int, int]] = []
        """(users that are left, bytes) of what is freed in this window."""
        for storage in graph.storages:
            if storage.maker >= 0:
                self._allocates[storage.maker] += storage.nbytes
            if not storage.kept:
                for user in storage.users:
                    self._touches[user].append(len(self._left))
                self._left.append((len(storage.users), storage.nbytes))

    def needs(self, index: int) -> int:
        """Bytes that are held while the node runs."""
        return self.held + self._allocates[index]

    def grows(self, index: int) -> int:
        """By how much more is held after the node than before."""
        freed = sum(self._left[at][1] for at in self._touches[index] if self._left[at][0] == 1)
        return self._allocates[index] - freed

    def take(self, index: int) -> None:
        """The node has run."""
        self.held += self._allocates[index]
        self.peak = max(self.peak, self.held)
        for at in self._touches[index]:
            left, nbytes = self._left[at]
            self._left[at] = (left - 1, nbytes)
            if left == 1:
                self.held -= nbytes
