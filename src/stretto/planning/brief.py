"""About how long a plan's step takes, found in little time: one variant over few microbatches, not proved.

    1. The step of fewer microbatches (`Step.short`) is simulated in one way: in pairs with so long a warm-up
       as is asked for, or without pairs. Another way takes its place where that cannot be, or where a rank
       needs more memory than it may.
    2. The other microbatches each take what one takes in the middle of that step: the work of the rank that
       has most of it, with what it waits for within blocks, or the time between two backwards of the first
       stage.

A plan tries several ways, and posts receives no earlier than it needs: it may be a little faster or slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import inf

from stretto.backend.process_memory import rarely_collected
from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.axes import DP, DP_SHARD, PP
from stretto.ir.parameters import scatters
from stretto.ir.program import Job
from stretto.ir.timeline import SpanKind, Timeline
from stretto.passes.sharded_state import sharded_state
from stretto.passes.stays import KINDS, kept_full
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning.choose import Variants, begins, likely_ways, short_steps
from stretto.planning.finish import MOST, sends_waited
from stretto.planning.make_plan import variants_of
from stretto.planning.tried import Variant
from stretto.planning.windows import at_once, lowered
from stretto.price.cluster import Description
from stretto.verifying.memory import peak_bytes

OUTSIDE_BLOCKS = (PP.name, DP.name, DP_SHARD.name)
"""Axes of messages between ranks, and of reductions once a step."""


@dataclass(frozen=True, slots=True)
class Brief:
    """step_us: of all microbatches; peak_bytes: of the fullest rank."""

    step_us: float
    peak_bytes: int


@rarely_collected()
def brief(job: Job, cluster: Description, order: str, ahead: int | None) -> Brief:
    """About what a plan of the job would take, with the schedule that it wishes, which is not "auto". order:
    of ops. ahead: of pairs (`AHEAD`), that are simulated first; None for no pairs. Where no way fits the
    memory of a device, the one that needs least comes out.

    Raises PlanError for a step that cannot be made, and where no way can order it.
    """
    variants = variants_of(job, cluster, order)
    missing: list[object] = []
    tight: list[Brief] = []
    # Where it is open what ranks keep in parts, less and less is full.
    for begin in begins() if job.zero == "auto" else begins()[:1]:
        try:
            before = variants.step(begin)
        except LeftOutError:
            continue
        except PlanError as error:
            if job.zero != "auto":
                raise
            missing += error.faults
            continue
        for made in _made(before, variants.context, ahead, missing):
            if before.max_bytes is None or made.peak_bytes <= before.max_bytes:
                return min(_fuller(variants, begin, made, ahead), made, key=lambda one: one.step_us)
            tight.append(made)
    if not tight:
        raise PlanError("no short step can be made", missing)
    return min(tight, key=lambda one: one.peak_bytes)


def _fuller(variants: Variants, begin: Variant, made: Brief, ahead: int | None) -> Brief:
    """The step in which as much stays full for longer as fits, in place of one whose microbatches gather or
    scatter; the same where none does."""
    before, context = variants.step(begin), variants.context
    if before.max_bytes is None or not scatters(before.job.zero):
        return made
    more = max(0, made.peak_bytes - max(context.peaks(before, True)))
    stays = partial(kept_full, first=KINDS[0], share=1.0, spare_bytes=more)
    try:
        fuller = variants.step(tuple(stays if one is sharded_state else one for one in begin))
    except (LeftOutError, PlanError):
        return made
    briefs = _made(fuller, context, ahead, [])
    return next((one for one in briefs if one.peak_bytes <= before.max_bytes), made)


def _made(before: Step, context: Context, ahead: int | None, missing: list[object]) -> Iterator[Brief]:
    """Step 1, in each way. missing: gets why some are not there."""
    count = before.short.microbatches
    limit_bytes = inf if before.max_bytes is None else before.max_bytes
    # As early as any plan may post its receives.
    ways = dict.fromkeys((*likely_ways(before, ahead), (at_once,)))  # the last needs least
    for short in short_steps(before, context, [*ways], MOST):
        if isinstance(short, PlanError):
            missing += short.faults
        elif isinstance(short, Exception):
            missing.append(str(short))
        else:
            more_us = (before.job.microbatches - count) * _period_us(short.timeline, count)
            needs_bytes = max(short.timeline.peak_bytes)
            if needs_bytes > limit_bytes:
                # Sends that are waited for as soon as they have left need less.
                sent = lowered(sends_waited(short.step, context), context)
                needs_bytes = max(peak_bytes(sent, rank) for rank in range(sent.ranks))
            yield Brief(short.timeline.step_us + more_us, needs_bytes)


def _period_us(timeline: Timeline, microbatches: int) -> float:
    """Step 2."""
    busy_us = list(timeline.by_rank(SpanKind.COMPUTE))
    for axis, exposed_us in timeline.exposed_axis_us().items():
        if axis not in OUTSIDE_BLOCKS:
            busy_us = [one + other for one, other in zip(busy_us, exposed_us, strict=True)]
    work_us = max(busy_us) / microbatches
    first, last = microbatches // 4, 3 * microbatches // 4
    done_us = {first: 0.0, last: 0.0}
    for span in timeline.spans:
        at, backward = span.microbatch, span.phase in (Phase.B, Phase.I)
        if span.kind is SpanKind.COMPUTE and span.stage == 0 and backward and at in done_us:
            done_us[at] = max(done_us[at], span.end_us)
    return max(work_us, (done_us[last] - done_us[first]) / max(1, last - first))
