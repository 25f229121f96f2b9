"""Zero bubble where phases are not equally long (arXiv 2401.10241, section 3): an order for given times.

One stage a rank, the backward split. The steps:

1. A rank runs as many forwards as end before the first input gradient can arrive, and as memory allows. A
   smaller number may be better, as a forward that has begun holds up an input gradient that arrives: on all
   ranks but the first, a part of a forward is given up.
2. Then an input gradient and a forward in turn. A weight gradient runs where the next of these is not ready,
   or does not fit the memory (`stretto.schedule.list_schedule`); it may spare the last input gradient.
3. Of such `TRIES`, the one with the smallest cost by the clock of `stretto.schedule.timing`.

Memory is counted as in the paper: a microbatch that waits for its weight gradient alone counts
`weight_share` of one, as the rest of what it saved is free. In a transformer of hidden size h, a heads and
sequences of s, that is 32 / (34 + 5 a s / h) where attention saves its scores.

Touches `stretto.ir` and this folder's clock and walk.
"""

from __future__ import annotations

import math

from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.family import Family, Wanted
from stretto.schedule.list_schedule import list_orders
from stretto.schedule.timing import PhaseTimes, time_schedule

TRIES = ((0.0, False), (0.25, False), (0.5, False), (0.0, True))
"""(part of a forward that is given up, whether the last input gradient is spared). Assumed; chosen on the
table of the paper."""


def _timed(wanted: Wanted) -> Schedule:
    wanted.times.check_stages(wanted.stages)
    memory = 2 * wanted.ranks if wanted.max_live is None else wanted.max_live
    tries = (_tried(wanted, memory, part, spare) for part, spare in TRIES)
    return min(tries, key=lambda schedule: time_schedule(schedule, wanted.times).cost)


def _tried(wanted: Wanted, memory: int, given_up: float, spare_last: bool) -> Schedule:
    """Steps 1 and 2."""
    ranks, microbatches = wanted.ranks, wanted.microbatches
    place: dict[Action, int] = {}
    for rank, warm_up in enumerate(_warm_ups(ranks, wanted.times, memory, given_up)):
        first = min(warm_up, microbatches)
        order = [Action(rank, Phase.F, k) for k in range(first)]
        for k in range(microbatches):
            order.append(Action(rank, Phase.I, k))
            if first + k < microbatches:
                order.append(Action(rank, Phase.F, first + k))
        place.update((action, at) for at, action in enumerate(order))
    orders = list_orders(
        range(ranks),
        microbatches,
        lambda action: place.get(action, action.microbatch),
        split=True,
        rank_limit=memory,
        weight_share=wanted.weight_share,
        in_turn=True,
        spare_last=spare_last,
        times=wanted.times,
    )
    return Schedule("zb-timed", ranks, microbatches, tuple(range(ranks)), orders)


def _warm_ups(ranks: int, times: PhaseTimes, memory: int, given_up: float) -> list[int]:
    """Step 1. They never grow from rank to rank, so that the order cannot deadlock."""
    forward = [times.of(Action(rank, Phase.F, 0)) for rank in range(ranks)]
    backward = [times.of(Action(rank, Phase.I, 0)) for rank in range(ranks)]
    found: list[int] = []
    for rank in range(ranks):
        hops = 2 * (ranks - 1 - rank)
        until = sum(forward[rank:]) + sum(backward[rank + 1 :]) + hops * times.message
        fits = until / forward[rank] if forward[rank] > 0 else math.inf
        most = min(memory, found[-1] if found else memory)
        found.append(max(1, math.floor(min(fits - (given_up if rank else 0.0) + 1e-9, most))))
    return found


TIMED = (
    Family(
        "zb-timed",
        _timed,
        "zero bubble for the times given with --times (equal ones without); twice 1F1B's memory",
        "heuristic of Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
        timed=True,
    ),
)
"""In the order in which they are listed to users."""
