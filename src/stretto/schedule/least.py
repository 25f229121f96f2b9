"""How soon a step can end whatever the order: a bound for given phase times.

1. A rank begins when the first of its stages has something to do, and works for all microbatches.
2. A microbatch goes through all stages and back, and its last weight gradient is the first stage's.
3. A microbatch holds memory of a rank from the begin of its F to the end of I, and something until the end of
   W; what all hold for their time fits under the rank's limit.

A step's *cost* counts each rank from its own begin, so that 1 is its work alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from stretto.ir.action import Action, Phase
from stretto.schedule.room import Room
from stretto.schedule.timing import PhaseTimes, hops_of


def least_time(
    stage_ranks: Sequence[int],
    microbatches: int,
    times: PhaseTimes,
    *,
    room: Room | None = None,
    max_live: int | None = None,
    from_own_begin: bool = False,
) -> float:
    """No order of these stages ends sooner, in the unit of `times`. from_own_begin: of the cost."""
    stages, ranks = len(stage_ranks), max(stage_ranks) + 1
    least = min(1.0, times.overlapped)
    forward, into, weight = (
        [least * times.of(Action(stage, phase, 0)) for stage in range(stages)]
        for phase in (Phase.F, Phase.I, Phase.W)
    )
    hops = hops_of(stage_ranks, times)
    # When each stage can begin.
    heads = [*accumulate((f + hop for f, hop in zip(forward, hops, strict=False)), initial=0.0)]
    # From the begin of a stage's F to the end of its I.
    alive = [
        math.fsum(forward[stage:]) + math.fsum(into[stage:]) + 2 * math.fsum(hops[stage:])
        for stage in range(stages)
    ]
    found = [alive[0] + weight[0]]
    for rank in range(ranks):
        mine = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        if not mine:
            continue
        begin = 0.0 if from_own_begin else min(heads[stage] for stage in mine)
        found.append(begin + microbatches * math.fsum(forward[s] + into[s] + weight[s] for s in mine))
        if max_live is not None:
            found += [begin + microbatches * (alive[s] + weight[s]) / max_live for s in mine]
        if room is not None and room.limits[rank] > 0:
            holds = math.fsum(room.whole[s] * alive[s] + room.for_weight[s] * weight[s] for s in mine)
            found.append(begin + microbatches * holds / room.limits[rank])
    return max(found)
