"""The best order of a small window, by exact search (constraint programming, CP-SAT of `ortools`).

    1. Every item that takes time on the compute lane is an interval there; every collective one on its lane,
       which begins no sooner than its start. No two intervals of a lane overlap.
    2. What an item needs ends before it begins; through waits, views and messages, that is when these are
       there.
    3. The window's end, with what must follow its messages, is as early as can be; the search ends when
       that is proved, or when its budget of deterministic work is spent. It begins with the list order.
    4. Items in the order of their begins, waits directly before their users.

Shares of the processor that collectives take are left out of the search, as they make a duration depend on
the order. The result is compared with the improved list order on the clock that has them, and the better of
the two is given. `ortools` is an extra: pip install 'stretto[exact]'.
"""

from __future__ import annotations

from typing import Any

from stretto.errors import TooLargeError, UsageError
from stretto.order.depend import Role, WindowGraph
from stretto.order.follow import replay
from stretto.order.window import captured_limit, improve_order, list_order, urgencies
from stretto.schedule.exact import solver_of

TICKS = 100
"""Whole numbers that CP-SAT counts with, per microsecond."""

LARGEST = 400
"""Nodes that take time in the largest window for which the search is worth its while. Assumed: above it, the
budget ends with what it was given."""

BUDGET = 20.0
"""Deterministic work of the search, in the solver's own unit (about a second of one core)."""


def exact_order(graph: WindowGraph) -> tuple[int, ...]:
    """The best order that the search finds.

    Raises UsageError when `ortools` is not there, TooLargeError for a window with more than LARGEST nodes.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UsageError(
            "order = 'exact' needs ortools, which is not installed: pip install 'stretto[exact]', or use "
            "order = 'improve'"
        ) from None
    heavy = sum(1 for node in graph.nodes if node.work_us or node.role is Role.START)
    if heavy > LARGEST:
        raise TooLargeError(
            f"window {graph.window.name} has {heavy} items that take time, too many for exact search "
            f"(at most {LARGEST}): use order = 'improve'"
        )
    known = improve_order(graph)
    begins = _solve(cp_model, graph, known)
    if begins is None:
        return known
    # 4. The list scheduler, told to follow the begins, puts waits and views in their places.
    found = list_order(graph, urgency=[-begin for begin in begins], limit_bytes=captured_limit(graph))
    limit = max(captured_limit(graph), replay(graph, known).peak_bytes)
    candidates = [known, found, _by_begin(graph, begins)]
    fitting = [order for order in candidates if replay(graph, order).peak_bytes <= limit]
    return min(fitting, key=lambda order: replay(graph, order).late_us)


def _solve(cp: Any, graph: WindowGraph, known: tuple[int, ...]) -> list[float] | None:
    """Steps 1 to 3: the begin of every node in microseconds; None when the search finds nothing."""

    def ticks(us: float) -> int:
        return round(us * TICKS)

    model = cp.CpModel()
    horizon = ticks(sum(n.work_us + n.time_us for n in graph.nodes)) + 1
    begins: list[Any] = []
    there: list[Any] = []
    lanes: dict[str, list[Any]] = {}
    for index, node in enumerate(graph.nodes):
        begin = model.new_int_var(0, horizon, f"b{index}")
        begins.append(begin)
        length = ticks(node.work_us)
        if length and not node.lazy:
            lanes.setdefault("", []).append(model.new_fixed_size_interval_var(begin, length, f"i{index}"))
        if node.role is Role.START:
            flight = model.new_int_var(0, horizon, f"f{index}")
            model.add(flight >= begin)
            us = ticks(node.time_us)
            lanes.setdefault(node.lane, []).append(model.new_fixed_size_interval_var(flight, us, f"l{index}"))
            there.append(flight + us)
        else:
            there.append(begin + length)
        if node.role is Role.RECEIVE or (node.role is Role.FINISH and node.start < 0):
            model.add(begin >= ticks(node.time_us))
    end = model.new_int_var(0, horizon, "end")
    for index in range(len(graph.nodes)):
        for needed in graph.before[index]:
            waits = graph.nodes[index].role is Role.FINISH and graph.nodes[index].start == needed
            ran = begins[needed] + ticks(graph.nodes[needed].work_us)
            model.add(begins[index] >= (there[needed] if waits else ran))
        node = graph.nodes[index]
        model.add(end >= begins[index] + ticks(node.work_us + node.tail_us))
    for intervals in lanes.values():
        model.add_no_overlap(intervals)
    model.minimize(end)
    _hint(model, graph, known, begins)
    solver = solver_of(cp, BUDGET)
    if solver.solve(model) not in (cp.OPTIMAL, cp.FEASIBLE):
        return None
    return [solver.value(begin) / TICKS for begin in begins]


def _hint(model: Any, graph: WindowGraph, known: tuple[int, ...], begins: list[Any]) -> None:
    """The known order's times, without shares of the processor, as where the search begins."""
    free: dict[str, float] = {}
    done: dict[int, float] = {}
    now_us = 0.0
    for index in known:
        node = graph.nodes[index]
        if node.role in (Role.FINISH, Role.RECEIVE):
            now_us = max(now_us, done[node.start] if node.start >= 0 else node.time_us)
        model.add_hint(begins[index], round(now_us * TICKS))
        if node.role is Role.START:
            done[index] = free[node.lane] = max(now_us, free.get(node.lane, 0.0)) + node.time_us
        now_us += node.work_us


def _by_begin(graph: WindowGraph, begins: list[float]) -> tuple[int, ...]:
    """Nodes in the order of their begins; what begins together as it was captured, lazy ones behind."""
    depth = urgencies(graph)
    order = sorted(
        (n for n, node in enumerate(graph.nodes) if not node.lazy), key=lambda n: (begins[n], -depth[n], n)
    )
    placed: dict[int, None] = {}

    def place(index: int) -> None:
        todo = [index]
        while todo:
            needed = [n for n in graph.before[todo[-1]] if n not in placed]
            if needed:
                todo += reversed(needed)
            else:
                placed.setdefault(todo.pop())

    for index in (*order, *range(len(graph.nodes))):
        place(index)
    return tuple(placed)
