"""What one rank orders, a window or its full step, prepared to be walked many times.

Waits, views and ops that take little are not placed by themselves: they come directly before their first
user, so that what arrives later than predicted stops the lane as late as possible.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from stretto.order.depend import Role, WindowGraph, WindowStorage
from stretto.simulating.windows import Call

MOST_NEEDED = 8_000_000
"""Ops that come directly before others, summed over a window, at most: about 1 GB. One that needs more than
its share is placed by itself. In a deep model all ops take little of a microbatch, and each would bring all
before it: 21 GB for 4 microbatches of Mixtral 8x7B."""


@dataclass(frozen=True, slots=True)
class Lead:
    """A start, and what must be before it: the waits, and the work on the compute lane behind them."""

    start: int
    waits: tuple[int, ...]
    work: tuple[int, ...]


@dataclass(frozen=True)
class RankWindow:
    """One rank's window, and the microbatches of its parts. By node:

    calls: its collective in a plan; () for a window by itself. waits: whether it waits for what comes over
    a lane or a link. placed: whether it is placed by itself: no wait, and nothing that comes directly before
    its first user. needs: what it needs that is not placed by itself, in a legal order, itself last. count,
    after: of waits and of what is placed by itself, how many of them it needs, directly or through others,
    and which of them need it.

    leads: its starts by part, in their order.
    """

    graph: WindowGraph
    microbatches: tuple[int, ...]
    calls: tuple[Call | None, ...]
    leads: tuple[tuple[Lead, ...], ...]
    waits: tuple[bool, ...]
    placed: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]
    count: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    @cached_property
    def work_us(self) -> float:
        """All work on the compute lane."""
        return self.graph.work_us

    @cached_property
    def leaving(self) -> frozenset[int]:
        """The starts that nothing in the window waits for."""
        return self.graph.leaving

    @cached_property
    def most_bytes(self) -> tuple[int, ...]:
        """By node, what it allocates with all that is placed with it, at most."""
        return tuple(sum(map(self.memory.allocates.__getitem__, needs)) for needs in self.needs)

    @cached_property
    def memory(self) -> WindowMemory:
        """The window's memory, at its begin."""
        return WindowMemory(len(self.graph.nodes), self.graph.storages)

    @cached_property
    def rest(self) -> tuple[int, ...]:
        """Nodes that none which is placed by itself needs; they come at the end."""
        needed = {index for one, needs in enumerate(self.needs) if self.placed[one] for index in needs}
        return tuple(index for index in range(len(self.placed)) if index not in needed)

    @cached_property
    def stretches(self) -> list[list[int]]:
        """Nodes that share part and next communication; work that leads to none is a group by itself."""
        graph = self.graph
        leads: list[int] = [-1] * len(graph.nodes)
        for index in reversed(range(len(graph.nodes))):
            if graph.nodes[index].role in (Role.START, Role.SEND):
                leads[index] = index
            else:
                leads[index] = min((leads[n] for n in graph.after[index] if leads[n] >= 0), default=-1)
        groups: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            if leads[index] >= 0 or node.work_us:
                groups.setdefault(leads[index] if leads[index] >= 0 else -1 - index, []).append(index)
        return list(groups.values())


def make_rank_window(
    graph: WindowGraph,
    microbatches: tuple[int, ...] = (),
    calls: tuple[Call | None, ...] = (),
    little: float | None = None,
) -> RankWindow:
    """A window ready to be walked. microbatches: of its parts, where these are known; calls: as in
    `RankWindow`.

    little: the share of a microbatch's work on a rank up to which an op comes directly before its first user,
        as views do; without it only views do.
    """
    microbatches = microbatches or (0,) * len(graph.window.parts)
    leads: dict[int, list[Lead]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.role is Role.START:
            leads[node.item.part].append(_lead(graph, index))
    lazy = _lazy(graph, microbatches, little)
    waits = tuple(node.role in (Role.FINISH, Role.RECEIVE) for node in graph.nodes)
    placed = [not one and not other for one, other in zip(lazy, waits, strict=True)]
    most = MOST_NEEDED // max(1, len(graph.nodes))
    needs: list[dict[int, None]] = []
    events: list[dict[int, None]] = []
    after: list[list[int]] = [[] for _ in graph.nodes]
    for index, before in enumerate(graph.before):  # nodes come behind what they use
        mine: dict[int, None] = {}
        met: dict[int, None] = {}
        for needed in before:
            mine.update({} if placed[needed] else needs[needed])
            met.update({needed: None} if placed[needed] or waits[needed] else events[needed])
        mine[index] = None
        placed[index] = placed[index] or (len(mine) > most and not waits[index])
        needs.append(mine)
        events.append(met)
        if placed[index] or waits[index]:
            for event in met:
                after[event].append(index)
    return RankWindow(
        graph,
        microbatches,
        calls,
        tuple(map(tuple, leads.values())),
        waits,
        tuple(placed),
        tuple(map(tuple, needs)),
        tuple(map(len, events)),
        tuple(map(tuple, after)),
    )


def _lazy(graph: WindowGraph, microbatches: tuple[int, ...], little: float | None) -> tuple[bool, ...]:
    """Waits, views, and ops that take little, if what they lead to is more than these."""
    if little is None:
        return tuple(node.lazy for node in graph.nodes)
    little_us = little * sum(node.work_us for node in graph.nodes) / len(set(microbatches))
    lazy = [node.lazy for node in graph.nodes]
    leads = [False] * len(lazy)
    for index in reversed(range(len(lazy))):  # users come behind what they use
        node = graph.nodes[index]
        leads[index] = any(not lazy[user] or leads[user] for user in graph.after[index])
        if node.role is Role.COMPUTE and node.work_us <= little_us:
            lazy[index] = node.lazy or leads[index]
    return tuple(lazy)


def _lead(graph: WindowGraph, start: int) -> Lead:
    waits: list[int] = []
    work: list[int] = []
    seen = {start}
    todo = [start]
    while todo:
        for index in graph.before[todo.pop()]:
            if index in seen:
                continue
            seen.add(index)
            if graph.nodes[index].role in (Role.FINISH, Role.RECEIVE):
                waits.append(index)
            else:
                if graph.nodes[index].work_us:
                    work.append(index)
                todo.append(index)
    return Lead(start, tuple(waits), tuple(work))


class WindowMemory:
    """Bytes of a window above those at its begin, item by item. now, peak: bytes; allocates: by node."""

    __slots__ = ("_freed", "_left", "_touches", "allocates", "now", "peak")

    def __init__(self, count: int, storages: Sequence[WindowStorage]) -> None:
        self.now = 0
        self.peak = 0
        self.allocates = [0] * count
        self._touches: list[list[int]] = [[] for _ in range(count)]
        self._freed = [storage for storage in storages if not storage.kept]
        self._left = [(len(storage.users), storage.nbytes) for storage in self._freed]
        """(users that are left, bytes) of what is freed in this window."""
        for at, storage in enumerate(self._freed):
            for user in storage.users:
                self._touches[user].append(at)
        for storage in storages:
            if storage.maker >= 0:
                self.allocates[storage.maker] += storage.nbytes

    def frees(self, index: int) -> int:
        """Bytes that no one reads after the node."""
        return sum(self._left[at][1] for at in self._touches[index] if self._left[at][0] == 1)

    def empty(self) -> WindowMemory:
        """The same window's at its begin."""
        made = copy.copy(self)
        made.now = made.peak = 0
        made._left = [(len(storage.users), storage.nbytes) for storage in self._freed]
        return made

    def take(self, index: int) -> None:
        """The node has run."""
        self.now += self.allocates[index]
        self.peak = max(self.peak, self.now)
        for at in self._touches[index]:
            left, nbytes = self._left[at]
            self._left[at] = (left - 1, nbytes)
            if left == 1:
                self.now -= nbytes
