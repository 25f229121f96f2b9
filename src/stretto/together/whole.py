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
    """One rank's only window. leads: its starts by part, in their order; calls: by node."""

    graph: WindowGraph
    microbatches: tuple[int, ...]
    calls: tuple[Call | None, ...]
    leads: tuple[tuple[Lead, ...], ...]


def make_whole(plan: Plan, graph: WindowGraph, microbatches: tuple[int, ...]) -> Whole:
    """A rank's window ready to be walked. graph: of the plan's window; microbatches: of its parts.

    Raises PlanError for ops or collectives without a cost.
    """
    leads: dict[int, list[Lead]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.role is Role.START:
            leads[node.item.part].append(_lead(graph, index))
    calls = make_ready(plan, graph.window.name).calls
    return Whole(graph, microbatches, calls, tuple(map(tuple, leads.values())))


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
