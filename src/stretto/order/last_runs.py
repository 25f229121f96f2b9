"""Orders of windows' last runs, in which gradient reductions start: the end of the step comes when the last
of these is done."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from stretto.order.depend import Role, WindowGraph
from stretto.order.policies import CLOSE, floor_us, improve_order, list_order, urgencies
from stretto.order.walk import replay

DELAYED = (1.0, 2.0)
"""How much work of weight gradients waits in a last run, in parts of what its reductions take beyond its end.
Assumed: those that wait have reductions themselves."""

WALKS_OF_LAST_RUN = 30
"""Walks of the search for the order of a window's last run. Assumed."""


def early_reductions(
    graph: WindowGraph, limit_bytes: int | None = None, *, search: bool = True
) -> tuple[int, ...]:
    """The best order of a window's last run, in which gradients are complete early, so that their reductions
    start within it. The measure is when the last of these is done; of orders that take about as long (CLOSE)
    the one with less memory. graph: of a window in the order that its other runs have; limit_bytes: as in
    `list_order`; search: whether 4. is tried. Tried are

    1. that order;
    2. each weight gradient as soon as it can run, before all that leads to more than one reduction;
    3. the same, but the last weight gradients wait, as much work of them as the reductions of 2. take beyond
       its end: a large one that comes last, as that of an embedding, is then done under them. For two
       machines, here compute and the lane, this is Johnson's rule: what has the longer way behind it is
       first;
    4. where the window has collectives of its own, which then have less to hide under, an order between,
       found by local search.
    """
    first = range(len(graph.nodes))
    as_is = replay(graph, first)
    walked = [(as_is, tuple(first))]
    # What needs more memory is tried where it may gain something.
    for limit in sorted({as_is.peak_bytes, max(as_is.peak_bytes, limit_bytes or 0)}):
        orders = ((replay(graph, order), order) for order in _last_orders(graph, limit, search))
        walked += [(played, order) for played, order in orders if played.peak_bytes <= limit]
        least_us = min(played.step_us for played, _ in walked)
        if least_us <= CLOSE * floor_us(graph):
            break
    close = [one for one in walked if one[0].step_us <= CLOSE * least_us]
    return min(close, key=lambda one: (one[0].peak_bytes, one[0].step_us, one[0].end_us))[1]


def _last_orders(graph: WindowGraph, limit: int, search: bool) -> Iterator[tuple[int, ...]]:
    """Those of `early_reductions` other than the first."""
    order = list_order(graph, urgency=_reductions_first(graph), limit_bytes=limit)
    yield order
    early = replay(graph, order)
    for times in DELAYED if early.step_us > early.end_us else ():
        delayed = _latest(graph, order, times * (early.step_us - early.end_us))
        yield list_order(graph, urgency=_reductions_first(graph, delayed), limit_bytes=limit)
    if search and any(node.role is Role.FINISH for node in graph.nodes):
        yield improve_order(graph, limit_bytes=limit, walks=WALKS_OF_LAST_RUN)


def _latest(graph: WindowGraph, order: Sequence[int], work_us: float) -> frozenset[int]:
    """What leads to one reduction and to nothing else, from the end of an order on, until it has so much
    work."""
    result: set[int] = set()
    own = _leading_to_one(graph)
    for index in reversed(order):
        if own[index]:
            result.add(index)
            work_us -= graph.nodes[index].work_us
            if work_us <= 0.0:
                break
    return frozenset(result)


def _reductions_first(graph: WindowGraph, delayed: Collection[int] = ()) -> list[float]:
    """Urgencies in which what leads to one reduction and to nothing else comes before all else, but for what
    is delayed."""
    urgency = urgencies(graph)
    above_us = max(urgency, default=0.0)
    for index, own in enumerate(_leading_to_one(graph)):
        if own and index not in delayed:
            urgency[index] += above_us
    return urgency


def _leading_to_one(graph: WindowGraph) -> list[bool]:
    """By node, whether it leads to one reduction and to no other communication."""
    leads = [0] * len(graph.nodes)  # bit n: to the communication that node n starts
    leaving = graph.leaving
    reductions = 0
    for index in reversed(range(len(graph.nodes))):
        role = graph.nodes[index].role
        if role in (Role.START, Role.SEND):
            leads[index] = 1 << index
        if index in leaving:  # and to those that need it
            reductions |= leads[index]
            continue
        for user in graph.after[index]:
            leads[index] |= leads[user]
    return [one.bit_count() == 1 and bool(one & reductions) for one in leads]
