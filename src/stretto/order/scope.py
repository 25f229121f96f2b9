"""What one rank orders, a window or its whole step, made ready to be walked many times.

Waits, views and what takes little have no place of their own: they stand directly before their first user, so
that what arrives later than predicted stops the lane as late as possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from stretto.order.depend import Role, WindowGraph
from stretto.order.storages import Memory
from stretto.simulating.windows import Call


@dataclass(frozen=True, slots=True)
class Lead:
    """A start, and what must be before it: the waits, and the work on the compute lane behind them."""

    start: int
    waits: tuple[int, ...]
    work: tuple[int, ...]


@dataclass(frozen=True)
class Whole:
    """One rank's window, and the microbatches of its parts. By node:

    calls: its collective in a plan; () for a window by itself. lazy: whether it stands directly before its
    first user. waits: whether it waits for what comes over a lane or a link. named: whether it stands for
    itself: neither lazy nor a wait. needs: what it needs that does not stand for itself, in an order in which
    it can stand, itself last. count, after: of waits and of what stands for itself, how many of them it
    needs, directly or through what is lazy, and which of them need it.

    leads: its starts by part, in their order.
    """

    graph: WindowGraph
    microbatches: tuple[int, ...]
    calls: tuple[Call | None, ...]
    leads: tuple[tuple[Lead, ...], ...]
    lazy: tuple[bool, ...]
    waits: tuple[bool, ...]
    named: tuple[bool, ...]
    needs: tuple[tuple[int, ...], ...]
    count: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """By node, all that must stand before it: bit k is node k."""
        found: list[int] = []
        for needs in self.graph.before:  # nodes stand behind what they use
            mask = 0
            for needed in needs:
                mask |= found[needed] | 1 << needed
            found.append(mask)
        return tuple(found)

    @cached_property
    def work_us(self) -> float:
        """All work on the compute lane."""
        return self.graph.work_us

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """By node, what it allocates with all that is placed with it, at most."""
        return tuple(sum(map(self.memory.allocates.__getitem__, needs)) for needs in self.needs)

    @cached_property
    def memory(self) -> Memory:
        """What the window holds, at its begin."""
        return Memory(len(self.graph.nodes), self.graph.storages)

    @cached_property
    def rest(self) -> tuple[int, ...]:
        """Nodes that no named one needs; they stand at the end."""
        needed = {index for one, needs in enumerate(self.needs) if self.named[one] for index in needs}
        return tuple(index for index in range(len(self.named)) if index not in needed)

    @cached_property
    def stretches(self) -> list[list[int]]:
        """Nodes that share part and next communication; work that leads to none is a group by itself."""
        graph = self.graph
        leads: list[int] = [-1] * len(graph.nodes)
        for index in reversed(range(len(graph.nodes))):
            if graph.nodes[index].role in (Role.START, Role.SEND, Role.SUM):
                leads[index] = index
            else:
                leads[index] = min((leads[n] for n in graph.after[index] if leads[n] >= 0), default=-1)
        found: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            if leads[index] >= 0 or node.work_us:
                found.setdefault(leads[index] if leads[index] >= 0 else -1 - index, []).append(index)
        return list(found.values())

    def names(self, order: Iterable[int]) -> list[int]:
        """Of an order of all nodes, those that stand for themselves."""
        return [index for index in order if self.named[index]]


def make_whole(
    graph: WindowGraph,
    microbatches: tuple[int, ...] = (),
    calls: tuple[Call | None, ...] = (),
    little: float | None = None,
) -> Whole:
    """A window ready to be walked. microbatches: of its parts, where these are known; calls: as in `Whole`.

    little: of a microbatch's work on a rank, what an op takes at most that stands directly before its first
        user, as views do; without it only views do.
    """
    microbatches = microbatches or (0,) * len(graph.window.parts)
    leads: dict[int, list[Lead]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.role is Role.START:
            leads[node.item.part].append(_lead(graph, index))
    lazy = _lazy(graph, microbatches, little)
    waits = tuple(node.role in (Role.FINISH, Role.RECEIVE) for node in graph.nodes)
    named = tuple(not one and not other for one, other in zip(lazy, waits, strict=True))
    needs: list[dict[int, None]] = []
    events: list[dict[int, None]] = []
    after: list[list[int]] = [[] for _ in graph.nodes]
    for index, before in enumerate(graph.before):  # nodes stand behind what they use
        mine: dict[int, None] = {}
        met: dict[int, None] = {}
        for needed in before:
            mine.update({} if named[needed] else needs[needed])
            met.update({needed: None} if named[needed] or waits[needed] else events[needed])
        mine[index] = None
        needs.append(mine)
        events.append(met)
        if named[index] or waits[index]:
            for event in met:
                after[event].append(index)
    return Whole(
        graph,
        microbatches,
        calls,
        tuple(map(tuple, leads.values())),
        lazy,
        waits,
        named,
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
    for index in reversed(range(len(lazy))):  # users stand behind what they use
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
