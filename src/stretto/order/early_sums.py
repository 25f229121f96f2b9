"""Orders of a window's last run in which gradients are complete early, so that their sums start within it.

By itself a window ends with its last op, and weight gradients fill the gaps that others leave. What follows
its last run is the end of the step, which comes when the last sum is done. So here the measure is when that
is (`Replay.late_us`), and weight gradients are tried in other places:

    1. in the order that the window has;
    2. each as soon as it can run, before all that leads to more than one sum: every sum starts as early as it
       can;
    3. where the window has collectives of its own, which then have less to hide under, in an order between,
       found by local search.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.order.depend import Role, WindowGraph
from stretto.order.follow import replay
from stretto.order.window import captured_limit, improve_order, list_order, urgencies

ROUNDS = 30
"""Of the local search of step 3; it begins with orders that serve. Assumed."""


def early_sums(graph: WindowGraph) -> tuple[int, ...]:
    """The best of these orders. graph: of a window in the order that its other runs have."""
    limit_bytes = captured_limit(graph)
    tried: list[Sequence[int]] = [
        range(len(graph.nodes)),
        list_order(graph, urgency=_sums_first(graph), limit_bytes=limit_bytes),
    ]
    if graph.communicates:
        tried.append(improve_order(graph, limit_bytes=limit_bytes, walks=ROUNDS))

    def measure(order: Sequence[int]) -> tuple[float, float, int]:
        played = replay(graph, order)
        return played.late_us, played.end_us, played.peak_bytes

    kept = [order for order in tried[1:] if replay(graph, order).peak_bytes <= limit_bytes]
    best: Sequence[int] = min((tried[0], *kept), key=measure)
    return tuple(best)


def _sums_first(graph: WindowGraph) -> list[float]:
    """Urgencies of step 2: what leads to one sum and to nothing else is more urgent than all else."""
    found = urgencies(graph)
    above_us = max(found, default=0.0)
    leads = [0] * len(graph.nodes)  # bit n: to the communication that node n starts
    sums = 0
    for index in reversed(range(len(graph.nodes))):
        role = graph.nodes[index].role
        if role in (Role.SUM, Role.START, Role.SEND):
            leads[index] = 1 << index
        sums |= leads[index] if role is Role.SUM else 0
        for user in graph.after[index]:
            leads[index] |= leads[user]
        if leads[index].bit_count() == 1 and leads[index] & sums:
            found[index] += above_us
    return found
