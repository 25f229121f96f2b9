"""One window by itself: how urgent its nodes are, its list order, and where the search begins.

1. The captured order, and list orders (`order.listing`) with the longest path as urgency. The memory
   limit is kept wherever something else than what would exceed it can run.
2. From the best of these the search (`order.search`) goes on by other urgencies, then by single ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.order.depend import Role, WindowGraph
from stretto.order.follow import replay
from stretto.order.moves import by_op, relisted
from stretto.order.push import Pushing
from stretto.order.scope import make_whole
from stretto.order.search import Budget, Point, Scope, Search

LITTLE = 0.0005
"""Of the window's work, what ops take at most that the search places directly before their first user. On
GPTs that is two ops of three, and 2 % of the time."""

WALKS = 600
"""The most walks for a window."""

WORK = 100_000
"""Walks times nodes that stand for themselves: large windows get fewer walks."""

FEWEST = 30
"""Walks of even the largest window."""

STALE = 100, 60, 150
"""So many walks without a gain end other urgencies, pushes, and single ops. Assumed."""

CHANGE = 2.0
"""By how much urgencies are changed, in parts of a typical collective and a typical stretch of ops.
Assumed."""

CLOSE = 1.001
"""An order this close to what no order can beat needs no improvement."""


def urgencies(graph: WindowGraph) -> list[float]:
    """How urgent nodes of one window are, in microseconds: the longest path to its end, through lanes as well
    as compute (critical path), or to the end of what must follow a message. What nothing waits for, as weight
    gradients, is the least urgent and fills gaps."""
    found = [0.0] * len(graph.nodes)
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        behind = max((found[n] for n in graph.after[index]), default=0.0)
        # What only a later window waits for is in no hurry.
        leads = node.role in (Role.SEND, Role.SUM) or (node.role is Role.START and graph.after[index])
        on_lane_us = max(node.time_us, node.tail_us) if leads else 0.0
        found[index] = max(node.work_us, on_lane_us) + behind
    return found


def captured_limit(graph: WindowGraph) -> int:
    """The bytes that the captured order needs, one part after the other: what an order may use as well."""
    return replay(graph, range(len(graph.nodes))).peak_bytes


def list_order(
    graph: WindowGraph, *, urgency: Sequence[float] | None = None, limit_bytes: int | None = None
) -> tuple[int, ...]:
    """An order of the graph's nodes.

    urgency: by node; `urgencies` without it. limit_bytes: above what is held at the window's begin; what the
    captured order needs without it.
    """
    limit = captured_limit(graph) if limit_bytes is None else limit_bytes
    scope = Scope((make_whole(graph),), 0.0, 0.0, limit_bytes=limit)
    made = scope.walk(Point((urgencies(graph) if urgency is None else urgency,), (0.0,)))
    assert made is not None, "a window by itself comes to its end"
    return made.orders[0]


def improve_order(
    graph: WindowGraph, *, limit_bytes: int | None = None, walks: int | None = None, share: float = 1.0
) -> tuple[int, ...]:
    """The best order found. limit_bytes: as in `list_order`; walks: instead of the constants above; share: of
    them, what the window is worth."""
    fine = Scope((make_whole(graph),), CLOSE * floor_us(graph), 0.0)
    captured = replace(fine, limit_bytes=0).walk(Point(orders=(range(len(graph.nodes)),)))
    assert captured is not None, "a legal order of one window comes to its end"
    fine = replace(fine, limit_bytes=captured.peak_bytes if limit_bytes is None else limit_bytes)
    # All ops where they can run, also the small ones: by the longest path, and as the search then finds them.
    tried = Search(fine, Budget(0))
    tried.best = captured
    tried.tried(Point((urgencies(graph),), (0.0,)))
    if not tried.close and walks != 0:
        found = _searched(graph, fine, walks, share)
        tried.tried(Point(orders=(found,)))
        places = {index: -float(at) for at, index in enumerate(found)}
        tried.tried(Point(([places[index] for index in range(len(found))],), (0.0,)))
    return tried.best.orders[0]


def _searched(graph: WindowGraph, fine: Scope, walks: int | None, share: float) -> tuple[int, ...]:
    """Step 2, with few ops placed for themselves."""
    whole = make_whole(graph, little=LITTLE)
    most = min(WALKS, WORK // max(1, sum(whole.named)))
    budget = Budget(walks or max(FEWEST, int(share * most)))
    starts_us = [node.time_us for node in graph.nodes if node.role is Role.START]
    typical_us = sum(starts_us) / max(1, len(starts_us)) + graph.work_us / max(1, len(whole.stretches))
    search = Search(replace(fine, wholes=(whole,), change_us=CHANGE * typical_us), budget)
    for patience in (0.0, 0.5):
        search.tried(Point((urgencies(graph),), (patience,)))
    search.go(relisted, budget.left // 2, STALE[0]).go(Pushing((whole,)), budget.left // 4, STALE[1])
    return by_op(search, budget.left, STALE[2]).orders[0]


def floor_us(graph: WindowGraph) -> float:
    """No order is faster: all work, and what collectives take of the processor meanwhile."""
    return graph.work_us + sum(n.load * n.time_us for n in graph.nodes if n.role is Role.START)
