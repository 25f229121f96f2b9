"""A step in which each rank has one window, its ops in orders that are given: how long it takes.

    1. An order names the nodes that stand for themselves: all that are neither waits nor views nor take
       little. What such a node needs stands directly before its first user.
    2. The lane stands until what the next node waits for has arrived, even if another could go.

What does not change from order to order is prepared once (`Steps`): a walk takes 0.8 of the time of one that
chooses. May touch `stretto.ir`, `stretto.schedule`, `stretto.simulate` and this room.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

from stretto.ir.plan import Plan
from stretto.order import Role
from stretto.order.whole_step.rank_step import Whole
from stretto.order.whole_step.walk import Chosen, Rank, Walk
from stretto.simulate.clock import Moment


class Steps:
    """The nodes of one rank's window that an order names, and what each of them needs.

    ancestors[node]: bit k is node k, which must stand before it.
    """

    def __init__(self, whole: Whole) -> None:
        self.whole = whole
        ancestors: list[int] = []
        for needs in whole.graph.before:  # nodes stand behind what they use
            mask = 0
            for needed in needs:
                mask |= ancestors[needed] | 1 << needed
            ancestors.append(mask)
        self.ancestors = ancestors

    @cached_property
    def rest(self) -> tuple[int, ...]:
        """Nodes that no named one needs; they stand at the end."""
        named = self.whole.named
        needed = {index for one, needs in enumerate(self.whole.needs) if named[one] for index in needs}
        return tuple(index for index in range(len(named)) if index not in needed)

    def named(self, order: Sequence[int]) -> list[int]:
        """The nodes of an order of all that an order for `follow` names."""
        return [index for index in order if self.whole.named[index]]


def follow(plan: Plan, steps: Sequence[Steps], orders: Sequence[Sequence[int]]) -> Chosen | None:
    """Walk the step; None when ranks stand for ever. steps, orders: by rank; each order names every named
    node once, behind its ancestors."""
    walk = Walk(plan)
    return walk.run(lambda rank: _Rank(walk, rank, steps[rank], orders[rank]))


class _Rank(Rank):
    def __init__(self, walk: Walk, rank: int, steps: Steps, given: Sequence[int]) -> None:
        super().__init__(walk, rank, steps.whole)
        self._steps = steps
        self._given = given
        self._next = 0

    def _go_on(self) -> None:
        while self._next < len(self._given):
            index = self._given[self._next]
            missing = [n for n in self._whole.needs[index] if not self._placed[n]]
            if self._waits(missing):
                return
            self._next += 1
            if self._busy(index, *self._put(missing)):
                return
            self._done(index)
        if not self.end_us and not self._waits(self._steps.rest):
            self._stands()
            self._put(self._steps.rest)
            self.end_us = self._clock.now_us

    def _waits(self, nodes: Sequence[int]) -> bool:
        """Step 2: whether something has not arrived; then the lane goes on when it has."""
        for index in nodes:
            arrived = self._arrival(index)
            if arrived is not None and not arrived.happened:
                self._stands()
                arrived.then(partial(self._wake, index))
                return True
        return False

    def _arrival(self, index: int) -> Moment | None:
        """What a wait or a receive waits for."""
        node = self.graph.nodes[index]
        if node.role is Role.FINISH and node.start >= 0:
            return self._started[node.start].done
        if node.role is Role.RECEIVE and self._travels(node):
            return self._message(node).arrived
        return None
