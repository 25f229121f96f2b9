"""Ops in orders that are given: how long a step takes whose ranks have one window each, or one window.

1. An order of a step names the nodes that stand for themselves: all that are neither waits nor views nor
   take little. What such a node needs stands directly before its first user. An order of a window names
   all nodes.
2. The lane waits until what the next node waits for has arrived, even if another could go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from stretto.order.depend import WindowGraph
from stretto.order.scope import Whole, make_whole
from stretto.order.storages import Memory
from stretto.order.walk import Rank, walk
from stretto.order.worlds import WindowWorld, World


@dataclass(frozen=True, slots=True)
class Replay:
    """end_us: when the window has ended; stands_us: of that, what the compute lane waited; peak_bytes: the
    most that it held, above what it held at its begin.

    late_us: when the window, what must follow its messages (`Node.tail_us`) and the sums that it starts have
    ended; never before `end_us`.
    """

    end_us: float
    stands_us: float
    peak_bytes: int
    late_us: float


def replay(graph: WindowGraph, order: Sequence[int]) -> Replay:
    """Walk a legal order of the graph's nodes."""
    world, memory = WindowWorld(graph), Memory(len(graph.nodes), graph.storages)
    rank = Following(world, 0, make_whole(graph), order, memory)
    made = walk(world, [rank])
    assert made is not None, "a legal order of one window comes to its end"
    end_us = rank.end_us
    return Replay(end_us, end_us - rank.worked_us, memory.peak, made.step_us)


class Following(Rank):
    """One rank's compute lane, whose ops come in the order that is given: of all nodes, or of those that
    stand for themselves."""

    def __init__(
        self, world: World, rank: int, whole: Whole, given: Sequence[int], memory: Memory | None = None
    ) -> None:
        super().__init__(world, rank, whole, memory)
        self._given = given
        self._all = len(given) == len(whole.named)
        self._next = 0

    def _go_on(self) -> None:
        while self._next < len(self._given):
            index = self._given[self._next]
            needs = (index,) if self._all else self.whole.needs[index]
            missing = [n for n in needs if not self._placed[n]]
            if self._awaits(missing):
                return
            self._next += 1
            if self._busy(index, *self._put(missing)):
                return
            self._done(index)
        rest = () if self._all else self.whole.rest
        if not self.end_us and not self._awaits(rest):
            self._waits_now()
            self._put(rest)
            self.end_us = self._clock.now_us

    def _awaits(self, nodes: Sequence[int]) -> bool:
        """Step 2: whether something has not arrived; then the lane goes on when it has."""
        for index in nodes:
            arrival = self._arrival(index)
            if arrival is not None:
                self._waits_now()
                arrival.then(partial(self._wake, index))
                return True
        return False
