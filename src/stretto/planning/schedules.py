"""Passes that change the schedule, or in which of its actions an op runs."""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.action import Schedule
from stretto.ir.program import Job
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning.across import across, split_stages
from stretto.planning.pair import apart, pair, whole
from stretto.schedule.family import first_microbatches
from stretto.schedule.timing import peak_live

ENOUGH = 4
"""Microbatches for every rank that are simulated to compare steps: warm-up, cool-down, and as many in
steady state. Assumed."""


def paired(step: Step, context: Context, *, ahead: int, ends: bool = False) -> Step:
    """The schedule in pairs (`stretto.planning.pair`)."""
    found = pair(step.schedule, ahead=ahead, ends=ends)
    if found is None:
        raise LeftOutError(f"no backward of {step.schedule.family!r} has a forward behind it to pair with")
    live = max(peak_live(found))
    if step.job.max_live is not None and live > step.job.max_live:
        raise LeftOutError(f"pairs need {live} live microbatches, and max_live is {step.job.max_live}")
    # Warm-up and cool-down of the shorter step are the same.
    short = found
    if step.short is not step.schedule:
        short = pair(step.short, ahead=ahead, ends=ends) or shorter(found)
    return replace(step, schedule=found, short=short, overlap="window")


def one_window(step: Step, context: Context) -> Step:
    """All actions of a rank in one window."""
    found = whole(step.schedule)
    if found is None:
        raise LeftOutError
    live, most = max(peak_live(found)), step.job.max_live
    if most is not None and live > most <= max(peak_live(apart(found))):
        # As few as in the schedule's own order leave a search nothing to choose from.
        raise LeftOutError(f"one window a rank may hold {live} live microbatches, and max_live is {most}")
    return replace(step, schedule=found, short=found, overlap="window")


def moved_across(step: Step, context: Context) -> Step:
    """Communications go on from one window to the next (`stretto.planning.across`)."""
    split = split_stages(step.schedule)
    job = context.once(step.job, ("across", split), lambda: across(step.job, split))
    if job is step.job:
        raise LeftOutError
    return replace(step, job=job)


def writes_buffers(job: Job) -> bool:
    """Whether microbatches change what later ones read, as a batch norm's running mean."""
    return any(buffer.updates for buffer in job.buffers)


def shorter(schedule: Schedule) -> Schedule:
    """The schedule by which steps are compared."""
    return shortened(schedule, ENOUGH * schedule.ranks)


def of_short(step: Step) -> str:
    """For a time of the shorter step, of how many microbatches it is; "" where that is the step itself."""
    if step.short is step.schedule:
        return ""
    return f" for {step.short.microbatches} of {step.schedule.microbatches} microbatches"


def shortened(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule of the first microbatches, at least 8; itself unless that is much less. Those of its
    slots that lose an action to it keep the rest."""
    count = max(8, microbatches)
    if schedule.microbatches <= 1.5 * count:
        return schedule
    return first_microbatches(schedule, count)
