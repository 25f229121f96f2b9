"""Moves of the search for orders (`order.search`): neighbours of the point to which it has come.

    1. `relisted`: another urgency of one to three stretches of ops, or of all ops of some actions, or another
       patience of a rank, or a message that is paired otherwise. Urgency is changed for a whole stretch,
       since what counts is which communication is reached first.
    2. `moved`: an op of one rank, or sometimes two, is put a few places earlier or later, not past what it
       needs or what needs it. Urgencies order ops by what follows them, and a lane that is free takes what
       there is. What they cannot say is left for here: that this op goes before that one, or that a lane
       waits although something could go.

The second is local search by insertion, as for job shops (Nowicki and Smutnicki, "A fast taboo search
algorithm for the job shop problem", 1996), with any op instead of those on the critical path: on GPTs over
pp=2 tp=2 moves of critical ops alone did no better, nor did annealing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stretto.order.scope import Whole
from stretto.order.search import Point, Search
from stretto.order.walk import Chosen

PAIRING = 0.1
"""Share of the moves that pair a message otherwise. Assumed."""

FAR = 6.0
"""Places by which an op is moved, on average."""


def relisted(search: Search) -> Iterator[Point]:
    """Move 1."""
    draw, point, wholes = search.draw, search.point, search.scope.wholes
    urgency = [list(of) for of in point.urgency]
    change_us = search.scope.change_us
    kind = draw.random()
    if point.pairs and draw.random() < PAIRING:
        at = draw.randrange(len(point.pairs))
        pairs = list(point.pairs)
        pairs[at] = pairs[at].moved(draw)
        yield replace(point, pairs=tuple(pairs))
        return
    if kind >= 0.92:
        patience = list(point.patience)
        patience[draw.randrange(len(patience))] = draw.choice((0.0, 0.25, 0.5, 0.75, 1.0, 1.5))
        yield replace(point, patience=tuple(patience))
        return
    if kind < 0.5 or all(len(whole.microbatches) == 1 for whole in wholes):
        for _ in range(draw.choice((1, 1, 2, 3))):
            rank, group = draw.choice(search.groups)
            by_us = draw.gauss(0.0, change_us)
            for index in group:
                urgency[rank][index] += by_us
    else:
        for _ in range(draw.choice((1, 1, 2))):
            rank = draw.randrange(len(wholes))
            part = draw.randrange(len(wholes[rank].microbatches))
            by_us = draw.gauss(0.0, draw.choice((0.25, 1.25)) * change_us)
            for index, node in enumerate(wholes[rank].graph.nodes):
                if node.item.part == part:
                    urgency[rank][index] += by_us
    yield replace(point, urgency=tuple(urgency))


def moved(search: Search) -> Iterator[Point]:
    """Move 2."""
    draw, orders = search.draw, search.point.orders
    changed = list(orders)
    for _ in range(draw.choice((1, 1, 1, 2))):
        at = draw.randrange(sum(map(len, orders)))
        rank = 0
        while at >= len(orders[rank]):
            at -= len(orders[rank])
            rank += 1
        far = (1 + int(draw.expovariate(1.0 / FAR))) * draw.choice((-1, 1))
        changed[rank] = put(search.scope.wholes[rank], changed[rank], at, far)
    if changed != list(orders):
        yield Point(orders=tuple(changed))


def by_op(search: Search, most: int, stale: int) -> Chosen:
    """What a search has found, or better by so many moves of single ops at most, and so many without a
    gain."""
    found = search.best
    assert found is not None
    if most <= 0 or search.ended:
        return found
    # An order that is given may take longer than it took where it was listed.
    other = Search(search.scope, search.budget)
    other.tried(search.scope.given(found))
    best = other.go(moved, most, stale).best
    return min(found, best or found, key=lambda one: one.measure_us)


def put(whole: Whole, order: Sequence[int], at: int, far: int) -> list[int]:
    """The order with the op at a place so many places further, or as far as it can go."""
    op, to = order[at], at
    while far < 0 and to > 0 and not whole.ancestors[op] >> order[to - 1] & 1:
        to, far = to - 1, far + 1
    while far > 0 and to < len(order) - 1 and not whole.ancestors[order[to + 1]] >> op & 1:
        to, far = to + 1, far - 1
    rest = [*order[:at], *order[at + 1 :]]
    return [*rest[:to], op, *rest[to:]]
