"""What a plan would about take, for a small part of its time: one variant over few microbatches, not proved.

    1. The step of fewer microbatches (`Step.short`) is put in order and simulated in one way: pairs with so
       long a warm-up as is asked for, or no pairs. Another way takes its place where that cannot be, or
       where a rank holds more than it may.
    2. The other microbatches each take what one takes in the middle of that step: the work of the rank that
       has most of it, with what it waits for within blocks, or the time between two backwards of the first
       stage.

A plan tries several ways, and posts receives no earlier than it needs: it may be a little faster or slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.backend.process_memory import rarely_collected
from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.axes import DP, PP
from stretto.ir.timeline import SpanKind, Timeline
from stretto.passes.step import LeftOutError
from stretto.planning.receives import MOST
from stretto.planning.sends import sends_waited
from stretto.planning.tries import Tries
from stretto.planning.variants import begins, brief_ways
from stretto.planning.windows import lowered
from stretto.simulating import simulate
from stretto.verifying.memory import peak_bytes

ONCE = (PP.name, DP.name)
"""Axes whose communication is not within blocks: messages between ranks, and sums once a step."""


BACK = (Phase.B, Phase.I)


@dataclass(frozen=True, slots=True)
class Brief:
    """step_us: of the whole step; peak_bytes: by rank."""

    step_us: float
    peak_bytes: tuple[int, ...]


@rarely_collected()
def brief(tries: Tries, ahead: int | None, fits: Callable[[Sequence[int]], bool]) -> Brief:
    """What a plan of the step that is tried would about take. ahead: of pairs (`AHEAD`), that are simulated
    first; None for no pairs. fits: whether ranks may hold so many bytes; where no way does, the one that
    holds least comes out.

    Raises PlanError for a step that cannot be made, and where no way can order it.
    """
    before, context = tries.step(begins()[0]), tries.context
    count = before.short.microbatches
    missing: list[object] = []
    tight: list[Brief] = []
    for way in brief_ways(before, ahead):
        step = replace(before, schedule=before.short)
        try:
            for one in way:
                step = one(step, context)
            # As early as any plan may post its receives.
            found = simulate(lowered(replace(step, ahead=MOST), context))
            more = before.job.microbatches - count
            made = Brief(found.step_us + more * _period_us(found, count), found.peak_bytes)
            if not fits(made.peak_bytes):
                # Sends that are waited for as soon as they have left hold less.
                sent = lowered(sends_waited(step, context), context)
                made = replace(made, peak_bytes=tuple(peak_bytes(sent, rank) for rank in range(sent.ranks)))
        except LeftOutError as error:
            missing.append(str(error))
        except PlanError as error:
            missing += error.faults
        else:
            if fits(made.peak_bytes):
                return made
            tight.append(made)
    if not tight:
        raise PlanError("no short step can be made", missing)
    return min(tight, key=lambda one: max(one.peak_bytes))


def _period_us(timeline: Timeline, microbatches: int) -> float:
    """Step 2."""
    busy_us = list(timeline.by_rank(SpanKind.COMPUTE))
    for axis, exposed_us in timeline.exposed_axis_us().items():
        if axis not in ONCE:
            busy_us = [one + other for one, other in zip(busy_us, exposed_us, strict=True)]
    work_us = max(busy_us) / microbatches
    first, last = microbatches // 4, 3 * microbatches // 4
    done_us = {first: 0.0, last: 0.0}
    for span in timeline.spans:
        at = span.microbatch
        if span.kind is SpanKind.COMPUTE and span.stage == 0 and span.phase in BACK and at in done_us:
            done_us[at] = max(done_us[at], span.end_us)
    return max(work_us, (done_us[last] - done_us[first]) / max(1, last - first))
