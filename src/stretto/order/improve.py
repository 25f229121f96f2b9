"""Better orders by local search: the list scheduler again and again with other urgencies, the best kept.

    1. The first orders: the list scheduler with and without `fit`, and the captured order.
    2. Groups: ops that lead to the same next communication are a stretch, and urgency is changed for a
       whole stretch, since what counts is which communication is reached first.
    3. Each round changes the urgency of one or two groups, or of one filler (what no communication waits
       for), by up to a few times a typical communication; or it holds a filler for a later start, or lets it
       go, since what fills one gap is not there for the next. A change is kept unless the window takes
       longer. Of equal times the one with less memory is kept.
    4. Then rounds in which the order of starts on a lane is given as well: two neighbours that do not need
       each other change places, or a group's urgency changes. So a lane may stand for a moment, until what
       is more urgent than what it could do is ready. The first such order keeps collectives together that
       little compute parts (a scatter and the gather of the next layer), which no other should come between.

The draws come from a fixed seed and rounds are counted, not timed, so equal windows get equal orders on
every machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from stretto.order.depend import Role, WindowGraph
from stretto.order.follow import replay
from stretto.order.scope import make_whole
from stretto.order.window import TooLongError, captured_limit, list_window, urgencies

ROUNDS = 600
"""The most rounds for a window. Measured on forward and backward of three GPT layers with sequence
parallelism, which need it most: 3000 rounds gain another 1 %."""

WORK = 200_000
"""Rounds times nodes: large windows get fewer rounds. Measured: 0.9 s on one core."""

FEWEST = 30
"""Rounds of even the largest window."""

SHORT = 0.5
"""Collectives belong together when the compute between them takes less than this share of the second."""

HOLDING = 0.25
"""Share of the rounds that hold a filler, or let one go. Assumed."""

CLOSE = 1.001
"""An order this close to what no order can beat needs no improvement."""


def improve_order(
    graph: WindowGraph, *, limit_bytes: int | None = None, rounds: int | None = None
) -> tuple[int, ...]:
    """The best order found. limit_bytes: as in `list_order`; rounds: instead of the constants above."""
    if limit_bytes is None:
        limit_bytes = captured_limit(graph)
    if rounds is None:
        rounds = max(FEWEST, min(ROUNDS, WORK // max(1, len(graph.nodes))))
    search = _Search(graph, limit_bytes)
    search.first()
    search.rounds(rounds)
    return search.order


def floor_us(graph: WindowGraph) -> float:
    """No order is faster: all work, and what collectives take of the processor meanwhile."""
    return graph.work_us + sum(n.load * n.time_us for n in graph.nodes if n.role is Role.START)


class _Search:
    def __init__(self, graph: WindowGraph, limit_bytes: int) -> None:
        self.graph = graph
        self.limit_bytes = limit_bytes
        self.urgency = urgencies(graph)
        self.order: tuple[int, ...] = tuple(range(len(graph.nodes)))
        self._whole = make_whole(graph)
        played = replay(graph, self.order)
        self.found = played.late_us, played.end_us, played.peak_bytes
        """Time with what must follow its messages, the window's own, then bytes."""
        self.fit = False
        self.sequence: list[int] | None = None
        self.held: dict[int, int] = {}
        self.floor_us = floor_us(graph)

    def _try(
        self,
        urgency: Sequence[float],
        fit: bool,
        sequence: Sequence[int] | None = None,
        held: Mapping[int, int] | None = None,
    ) -> bool:
        held = self.held if held is None else held
        most_us = self.found[0]
        try:
            made = list_window(self._whole, urgency, fit, self.limit_bytes, sequence, held, most_us)
        except TooLongError:
            return False
        assert made.memory is not None
        score = max(made.end_us, made.late_us), made.end_us, made.memory.peak
        if score > self.found:
            return False
        self.order, self.found = tuple(made.order), score
        return True

    def first(self) -> None:
        """Step 1."""
        self._try(self.urgency, False)
        self.fit = self._try(self.urgency, True)

    def rounds(self, count: int) -> None:
        """Steps 3 and 4, `count` rounds in all."""
        draw = random.Random(0)
        groups = stretches(self.graph)
        idle = fillers(self.graph)
        starts = [n for n, node in enumerate(self.graph.nodes) if node.role is Role.START]
        if not starts or not groups:
            return
        sizes_us = sum(self.graph.nodes[n].time_us for n in starts)
        typical_us = sizes_us / len(starts) + self.graph.work_us / len(groups)
        needs = self._whole.ancestors
        for done in range(count):
            if self.found[0] <= CLOSE * self.floor_us:
                return
            if 2 * done >= count and self.sequence is None:
                self.sequence = [n for n in self.order if self.graph.nodes[n].role is Role.START]
                together = _together(self.graph, needs, self.sequence)
                if self._try(self.urgency, self.fit, together):
                    self.sequence = together
            sequence = self.sequence
            urgency = self.urgency
            held = dict(self.held)
            if idle and len(starts) > 1 and draw.random() < HOLDING:
                for _ in range(draw.choice((1, 1, 2))):
                    filler = draw.choice(idle)
                    if held.pop(filler, None) is None or draw.random() < 0.5:
                        held[filler] = draw.choice(starts)
            elif sequence is not None and len(sequence) > 1 and draw.random() < 0.6:
                sequence = list(sequence)
                for _ in range(draw.choice((1, 1, 2, 3))):
                    at = draw.randrange(len(sequence) - 1)
                    first, second = sequence[at : at + 2]
                    if not needs[second] >> first & 1:
                        sequence[at : at + 2] = second, first
            else:
                urgency = list(urgency)
                for _ in range(draw.choice((1, 1, 2))):
                    change_us = draw.gauss(0.0, 2.0) * typical_us
                    for index in draw.choice(groups):
                        urgency[index] += change_us
            fit = self.fit if draw.random() < 0.8 else not self.fit
            if self._try(urgency, fit, sequence, held):
                self.urgency, self.fit, self.sequence, self.held = urgency, fit, sequence, held


def _together(graph: WindowGraph, needs: Sequence[int], sequence: Sequence[int]) -> list[int]:
    """Step 4: the order of starts with those directly behind each other that little compute parts."""
    starts = sum(1 << n for n in sequence)
    found: list[int] = []
    placed = 0
    for first in sequence:
        at: int | None = first
        while at is not None and not placed >> at & 1:
            found.append(at)
            placed |= 1 << at
            before = at
            at = next(
                (
                    n
                    for n in sequence
                    if needs[n] >> before & 1
                    and not placed >> n & 1
                    and not needs[n] & starts & ~placed
                    and _work_between(graph, needs, before, n) < SHORT * graph.nodes[n].time_us
                ),
                None,
            )
    return found


def _work_between(graph: WindowGraph, needs: Sequence[int], first: int, last: int) -> float:
    """The work of what needs `first` and is needed by `last`."""
    return sum(
        graph.nodes[n].work_us
        for n in range(first + 1, last)
        if needs[n] >> first & 1 and needs[last] >> n & 1
    )


def stretches(graph: WindowGraph) -> list[list[int]]:
    """Step 2: nodes that share part and next communication; what leads to none is a group by itself."""
    leads = _leads(graph)
    found: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for index, node in enumerate(graph.nodes):
        if leads[index] >= 0:
            found.setdefault(leads[index], []).append(index)
        elif node.work_us:
            alone.append([index])
    return [*found.values(), *alone]


def fillers(graph: WindowGraph) -> list[int]:
    """Work that leads to no communication."""
    leads = _leads(graph)
    return [index for index, node in enumerate(graph.nodes) if leads[index] < 0 and node.work_us]


def _leads(graph: WindowGraph) -> list[int]:
    """By node, the next communication that it leads to; -1 for none."""
    leads: list[int] = [-1] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        if graph.nodes[index].role in (Role.START, Role.SEND, Role.SUM):
            leads[index] = index
        else:
            leads[index] = min((leads[n] for n in graph.after[index] if leads[n] >= 0), default=-1)
    return leads
