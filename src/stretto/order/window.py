"""One window by itself: how urgent its nodes are, its list order, and the search for a better one.

1. The captured order, and list orders (`order.list_scheduler`) with the longest path as urgency. The memory
   limit is kept wherever something else than what would exceed it can run.
2. From the best of these the search (`order.search`) goes on by other urgencies, then by forward-backward
   improvement.
3. A window's last run has another measure: the end of the step comes when the last gradient reduction is done
   (`early_reductions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.order.depend import Role, WindowGraph
from stretto.order.forward_backward import ForwardBackward
from stretto.order.rank_window import make_rank_window
from stretto.order.search import OrderSearch, SearchPoint, SearchScope, WalkBudget, new_urgencies
from stretto.order.walk import replay

LITTLE = 0.0005
"""Share of the window's work up to which an op comes directly before its first user in the search. On GPTs
that is two ops of three, and 2 % of the time."""

WALKS = 600
"""Walks for a window, at most. Assumed."""

WORK = 100_000
"""Walks times nodes that are placed by themselves, at most: large windows get fewer walks. Assumed."""

FEWEST = 30
"""Walks of even the largest window. Assumed."""

STALE_WALKS = 100
"""Walks without a gain that end a move of the search. Assumed."""

CHANGE = 2.0
"""By how much urgencies are changed, in parts of a typical collective and a typical stretch of ops.
Assumed."""

CLOSE = 1.001
"""An order is not improved within this factor of what no order can beat. Assumed."""

WALKS_OF_LAST_RUN = 30
"""Walks of the search for the order of a window's last run. Assumed."""


def urgencies(graph: WindowGraph) -> list[float]:
    """How urgent nodes of one window are, in microseconds: the longest path to its end, through lanes as well
    as compute (critical path). What nothing waits for, as weight gradients, is the least urgent and fills
    gaps."""
    path_us = [0.0] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        behind = max((path_us[n] for n in graph.after[index]), default=0.0)
        # What only a later window waits for is in no hurry.
        leads = node.role in (Role.SEND, Role.SUM) or (node.role is Role.START and graph.after[index])
        on_lane_us = node.time_us if leads else 0.0
        path_us[index] = max(node.work_us, on_lane_us) + behind
    return path_us


def captured_limit(graph: WindowGraph) -> int:
    """The bytes that the captured order needs, one part after the other: what an order may use as well."""
    return replay(graph, range(len(graph.nodes))).peak_bytes


def list_order(
    graph: WindowGraph, *, urgency: Sequence[float] | None = None, limit_bytes: int | None = None
) -> tuple[int, ...]:
    """An order of the graph's nodes.

    urgency: by node; `urgencies` without it. limit_bytes: above the memory at the window's begin; what the
    captured order needs without it.
    """
    limit = captured_limit(graph) if limit_bytes is None else limit_bytes
    scope = SearchScope((make_rank_window(graph),), 0.0, 0.0, limit_bytes=limit)
    result = scope.walk(SearchPoint((urgencies(graph) if urgency is None else urgency,), (0.0,)))
    assert result is not None, "a window by itself comes to its end"
    return result.orders[0]


def improve_order(
    graph: WindowGraph, *, limit_bytes: int | None = None, walks: int | None = None, share: float = 1.0
) -> tuple[int, ...]:
    """The best order of the search. limit_bytes: as in `list_order`; walks: instead of the constants above;
    share: of them, what the window is worth."""
    fine = SearchScope((make_rank_window(graph),), CLOSE * floor_us(graph), 0.0)
    captured = replace(fine, limit_bytes=0).walk(SearchPoint(orders=(range(len(graph.nodes)),)))
    assert captured is not None, "a legal order of one window comes to its end"
    fine = replace(fine, limit_bytes=captured.peak_bytes if limit_bytes is None else limit_bytes)
    # All ops where they can run, also the small ones: by the longest path, and as the search orders them.
    search = OrderSearch(fine, WalkBudget(0))
    search.best = captured
    search.tried(SearchPoint((urgencies(graph),), (0.0,)))
    if not search.close and walks != 0:
        order = _searched(graph, fine, walks, share)
        search.tried(SearchPoint(orders=(order,)))
        positions = {index: -float(at) for at, index in enumerate(order)}
        search.tried(SearchPoint(([positions[index] for index in range(len(order))],), (0.0,)))
    return search.best.orders[0]


def _searched(graph: WindowGraph, fine: SearchScope, walks: int | None, share: float) -> tuple[int, ...]:
    """Step 2, with few ops placed by themselves."""
    window = make_rank_window(graph, little=LITTLE)
    most = min(WALKS, WORK // max(1, sum(window.placed)))
    budget = WalkBudget(walks or max(FEWEST, int(share * most)))
    starts_us = [node.time_us for node in graph.nodes if node.role is Role.START]
    typical_us = sum(starts_us) / max(1, len(starts_us)) + graph.work_us / max(1, len(window.stretches))
    search = OrderSearch(replace(fine, windows=(window,), change_us=CHANGE * typical_us), budget)
    for patience in (0.0, 0.5):
        search.tried(SearchPoint((urgencies(graph),), (patience,)))
    search.go(new_urgencies, budget.left // 2, STALE_WALKS)
    search.go(ForwardBackward((window,)), budget.left, STALE_WALKS)
    assert search.best is not None, "a window by itself comes to its end"
    return search.best.orders[0]


def floor_us(graph: WindowGraph) -> float:
    """No order is faster: all work, and what collectives take of the processor meanwhile."""
    return graph.work_us + sum(n.load * n.time_us for n in graph.nodes if n.role is Role.START)


def early_reductions(graph: WindowGraph) -> tuple[int, ...]:
    """The best order of a window's last run, in which gradients are complete early, so that their reductions
    start within it. The measure is when the last of these is done. graph: of a window in the order that its
    other runs have. Tried are

    1. that order;
    2. each weight gradient as soon as it can run, before all that leads to more than one reduction;
    3. where the window has collectives of its own, which then have less to hide under, an order between,
       found by local search.
    """
    limit_bytes = captured_limit(graph)
    orders: list[Sequence[int]] = [
        range(len(graph.nodes)),
        list_order(graph, urgency=_reductions_first(graph), limit_bytes=limit_bytes),
    ]
    if graph.communicates:
        orders.append(improve_order(graph, limit_bytes=limit_bytes, walks=WALKS_OF_LAST_RUN))

    def measure(order: Sequence[int]) -> tuple[float, float, int]:
        played = replay(graph, order)
        return played.late_us, played.end_us, played.peak_bytes

    fitting = [order for order in orders[1:] if replay(graph, order).peak_bytes <= limit_bytes]
    best: Sequence[int] = min((orders[0], *fitting), key=measure)
    return tuple(best)


def _reductions_first(graph: WindowGraph) -> list[float]:
    """Urgencies in which what leads to one reduction and to nothing else comes before all else."""
    urgency = urgencies(graph)
    above_us = max(urgency, default=0.0)
    leads = [0] * len(graph.nodes)  # bit n: to the communication that node n starts
    reductions = 0
    for index in reversed(range(len(graph.nodes))):
        role = graph.nodes[index].role
        if role in (Role.SUM, Role.START, Role.SEND):
            leads[index] = 1 << index
        reductions |= leads[index] if role is Role.SUM else 0
        for user in graph.after[index]:
            leads[index] |= leads[user]
        if leads[index].bit_count() == 1 and leads[index] & reductions:
            urgency[index] += above_us
    return urgency
