"""The bound of memory: how soon a step can end when a stage may hold only so many microbatches.

A microbatch is live on a stage from the start of its forward to
the end of its last backward action. If it must be so for D, and L may be at one time, then all m of them
take at least m * D / L: every microbatch occupies one of L places for D. Before that lies what must come
before the first forward, after it what must follow the last backward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.bounds.reach import Reach
from stretto.bounds.stage import NEVER, Array
from stretto.ir.action import Phase
from stretto.ir.program import Job


@dataclass(frozen=True, slots=True)
class LiveBound:
    """us = head + microbatches * alive / limit + tail, for one stage, in microseconds."""

    us: float
    head_us: float
    alive_us: float
    tail_us: float


def live_bound(job: Job, reach: Reach, stage: int, limit: int) -> LiveBound | None:
    """The bound of one stage that may hold `limit` live microbatches; None where nothing runs backward."""
    here = reach.stages[stage]
    backward = ~here.forward
    if not backward.any() or not here.forward.any():
        return None
    tail_us = float(here.tail_us[backward].min())
    # From the stage's start, or from where a forward's value arrives, which is later and leaves less to wait.
    points = [(0.0, here.distances.from_start)]
    for edge, found in zip(here.edges_in, here.distances.from_arrival, strict=True):
        if edge.user_phase is Phase.F:
            points.append((reach.arrives_us(edge), found))
    bounds = []
    for head_us, found in points:
        alive_us = _alive_us(reach, stage, found)
        total_us = head_us + job.microbatches * alive_us / limit + tail_us
        bounds.append(LiveBound(total_us, head_us, alive_us, tail_us))
    return max(bounds, key=lambda bound: bound.us)


def _alive_us(reach: Reach, stage: int, since: Array) -> float:
    """From a point of a stage's forward to the end of its last backward op. since: from it to ops' ends."""
    here = reach.stages[stage]
    arrives_us = [NEVER] * len(reach.leaves_us)
    for edge in reach.order:
        source = reach.stages[edge.source]
        leaves_us = source.leaving_us(edge, since) if edge.source == stage else NEVER
        for arriving, found in zip(source.edges_in, source.distances.from_arrival, strict=True):
            passes_us = source.leaving_us(edge, found)
            if passes_us > NEVER:
                leaves_us = max(leaves_us, arrives_us[arriving.index] + passes_us)
        arrives_us[edge.index] = leaves_us + reach.travel_us[edge.index]
    backward = ~here.forward
    alive_us = float(since[backward].max())
    for arriving, found in zip(here.edges_in, here.distances.from_arrival, strict=True):
        alive_us = max(alive_us, arrives_us[arriving.index] + float(found[backward].max()))
    return alive_us if math.isfinite(alive_us) else 0.0
