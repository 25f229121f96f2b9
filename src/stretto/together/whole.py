"""A rank whose step is one window: its graph, its collectives, and what must be before each of them starts.

May touch `stretto.ir`, `stretto.schedule` and `stretto.simulate`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stretto.ir.plan import Plan
from stretto.schedule.order import Role, WindowGraph
from stretto.simulate.windows import Call, make_ready


@dataclass(frozen=True, slots=True)
class Lead:
    """A start, and what must be before it: the waits, and the work on the compute lane behind them."""

    start: int
    waits: tuple[int, ...]
    work: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """One rank's only window. leads: its starts by part, in their order; calls: by node; lazy: by node,
    whether it stands directly before its first user."""

    graph: WindowGraph
    microbatches: tuple[int, ...]
    calls: tuple[Call | None, ...]
    leads: tuple[tuple[Lead, ...], ...]
    lazy: tuple[bool, ...]


def make_whole(plan: Plan, graph: WindowGraph, microbatches: tuple[int, ...], little: float) -> Whole:
    """A rank's window ready to be walked. graph: of the plan's window; microbatches: of its parts.

    little: of a microbatch's work on a rank, what an op takes at most that stands directly before its first
        user, as views do.

    Raises PlanError for ops or collectives without a cost.
    """
    leads: dict[int, list[Lead]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.role is Role.START:
            leads[node.item.part].append(_lead(graph, index))
    calls = make_ready(plan, graph.window.name).calls
    return Whole(
        graph, microbatches, calls, tuple(map(tuple, leads.values())), _lazy(graph, microbatches, little)
    )


def _lazy(graph: WindowGraph, microbatches: tuple[int, ...], little: float) -> tuple[bool, ...]:
    """Waits, views, and ops that take little, if what they lead to is more than these."""
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
