"""What is urgent, by rules that know how long phases take: for `stretto.schedule.list_schedule`.

* `backward_first`: input gradients before forwards, older microbatches first. Memory is what holds a rank
  back.
* `warm_up_first`, one stage a rank, in turn (heuristic of arXiv 2401.10241, section 3): as many forwards as
  end before the first input gradient can arrive, and as memory allows; then an input gradient and a forward
  in turn. A smaller number may be better, as a forward that has begun holds up an input gradient that
  arrives: on all ranks but the first, a part of a forward is given up.
"""

from __future__ import annotations

import math

from stretto.ir.action import Action, Phase
from stretto.schedule.list_schedule import Urgency
from stretto.schedule.timing import PhaseTimes, hops_of

ROUNDING = 1e-9
"""Part of a forward by which two times that are equal may differ."""


def backward_first(stages: int, microbatches: int) -> Urgency:
    """Input gradients, then forwards, each with the oldest microbatch and the last stage first."""

    def urgency(action: Action) -> float:
        later = microbatches if action.phase is Phase.F else 0
        return (later + action.microbatch) * stages + stages - 1 - action.stage

    return urgency


def warm_up_first(
    ranks: int, microbatches: int, times: PhaseTimes, memory: float, given_up: float
) -> Urgency:
    """See above. memory: the most live microbatches of a rank. given_up: as a part of a forward."""
    place: dict[Action, int] = {}
    for rank, warm_up in enumerate(_warm_ups(ranks, times, memory, given_up)):
        first = min(warm_up, microbatches)
        order = [Action(rank, Phase.F, k) for k in range(first)]
        for k in range(microbatches):
            order.append(Action(rank, Phase.I, k))
            if first + k < microbatches:
                order.append(Action(rank, Phase.F, first + k))
        place.update((action, at) for at, action in enumerate(order))
    return lambda action: place.get(action, action.microbatch)


def _warm_ups(ranks: int, times: PhaseTimes, memory: float, given_up: float) -> list[int]:
    """They never grow from rank to rank, so that the order cannot deadlock."""
    forward = [times.of(Action(rank, Phase.F, 0)) for rank in range(ranks)]
    backward = [times.of(Action(rank, Phase.I, 0)) for rank in range(ranks)]
    hops = hops_of(range(ranks), times)
    result: list[int] = []
    for rank in range(ranks):
        until = sum(forward[rank:]) + sum(backward[rank + 1 :]) + 2 * sum(hops[rank:])
        fits = until / forward[rank] if forward[rank] > 0 else math.inf
        most = min(memory, result[-1] if result else memory)
        result.append(max(1, math.floor(min(fits - (given_up if rank else 0.0) + ROUNDING, most))))
    return result
