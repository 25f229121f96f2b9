"""Better orders of a step in which each rank has one window, by moving one op at a time.

Urgencies (`whole_step.search`) order ops by what follows them, whole stretches alike, and a lane that is free
takes what there is. What they cannot say is left for here: that this op goes before that one, or that a lane
stands although something could go. So:

    1. An op of one rank, or sometimes two, is put a few places earlier or later, not past what it needs or
       what needs it; the step is walked in these orders (`order.follow`).
    2. What makes less of the step, with a little of the time that lanes stand for collectives
       (`Chosen.measure_us`), is kept; so is what makes as much.

This is local search by insertion, as for job shops (Nowicki and Smutnicki, "A fast taboo search algorithm for
the job shop problem", 1996), with any op instead of those on the critical path: on GPTs over pp=2 tp=2 moves
of critical ops alone did no better, nor did annealing.

Moves are counted, not timed, and draws have a fixed seed, so equal jobs get equal plans on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from stretto.ir.plan import Plan
from stretto.order.follow import follow
from stretto.order.scope import Whole
from stretto.order.walk import Chosen
from stretto.order.whole_step.budget import Budget

MOST = 4_000
"""Moves for one job."""

A_MOVE_US = 2_000.0
"""Of a step, what is worth trying one move. A move takes some 10 ms, once, and the first thousand gain 1 %:
short steps would have to be run many times to pay for that. Assumed."""

STALE = 1_000
"""So many moves without a gain end the search. Assumed."""

GAIN = 0.0005
"""Share of a step that counts as a gain. Assumed."""

FAR = 6.0
"""Places by which an op is moved, on average."""


def move_ops(
    plan: Plan,
    wholes: Sequence[Whole],
    found: Chosen,
    enough_us: float,
    budget: Budget,
    *,
    share: float = 1.0,
) -> Chosen:
    """The orders that were found, or better ones. A step of `enough_us` need not be improved. share: of the
    moves that one job may have."""
    orders = [mine.names(order) for mine, order in zip(wholes, found.orders, strict=True)]
    ranks = [rank for rank, order in enumerate(orders) for _ in order]
    tries = min(budget.left, int(share * min(MOST, found.step_us / A_MOVE_US)))
    best = follow(plan, wholes, orders) if tries and ranks and found.step_us > enough_us else None
    if best is None:
        return found
    draw = random.Random(0)
    mark_us, stale = best.measure_us, 0
    for _ in range(tries):
        if best.step_us <= enough_us or stale >= STALE:
            break
        budget.spend()
        changed = list(orders)
        for _ in range(draw.choice((1, 1, 1, 2))):
            rank = draw.choice(ranks)
            at = draw.randrange(len(orders[rank]))
            far = (1 + int(draw.expovariate(1.0 / FAR))) * draw.choice((-1, 1))
            changed[rank] = _moved(wholes[rank], changed[rank], at, far)
        tried = follow(plan, wholes, changed) if changed != orders else None
        stale += 1
        if tried is not None and tried.measure_us <= best.measure_us:
            best, orders = tried, changed
            if best.measure_us < mark_us * (1.0 - GAIN):
                mark_us, stale = best.measure_us, 0
    return best if best.step_us <= found.step_us else found


def _moved(whole: Whole, order: Sequence[int], at: int, far: int) -> list[int]:
    """The order with the op at a place so many places further, or as far as it can go."""
    op, to = order[at], at
    while far < 0 and to > 0 and not whole.ancestors[op] >> order[to - 1] & 1:
        to, far = to - 1, far + 1
    while far > 0 and to < len(order) - 1 and not whole.ancestors[order[to + 1]] >> op & 1:
        to, far = to + 1, far - 1
    rest = [*order[:at], *order[at + 1 :]]
    return [*rest[:to], op, *rest[to:]]
