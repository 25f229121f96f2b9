"""Schedules: what settings or arguments ask for, of each form of a step, and the passes that change one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.errors import UsageError
from stretto.ir.action import Schedule
from stretto.ir.forms import forms_of
from stretto.ir.program import Job
from stretto.ir.stage_maps import AUTO, shared
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning.pair import apart, equal_groups, full, of_stages, pair
from stretto.schedule.csv import read_csv
from stretto.schedule.families import PLAIN_OF_SEVERAL, forward_schedule, make_schedule
from stretto.schedule.family import first_microbatches
from stretto.schedule.timing import peak_live

MOST_ACTIONS = 100_000
"""Forwards and backwards that a plan may have, each of which it lists, walks and proves: some ten seconds of
a core. Assumed: published layouts have less than half of that, as 192 microbatches of 96 stages."""

ENOUGH = 4
"""Microbatches for every rank that are simulated to compare steps: warm-up, cool-down, and as many in
steady state. Assumed."""


def choose_schedule(job: Job, *, schedule: str | Schedule | None = None) -> Schedule:
    """schedule: a family, the path of a CSV, or a schedule; the job's own wish by default.

    A job of forwards only (`stretto.ir.forms`) has one possible order; a given Schedule shows only where
    its stages are.

    Raises UsageError for an unknown family, for a schedule whose stages, microbatches or ranks are not the
    job's, for one that keeps more microbatches live than the job allows, and for too many microbatches. Of
    "auto", one to begin with.
    """
    most = max(1, MOST_ACTIONS // (2 * len(job.stages)))
    if job.microbatches > most:
        stages = f"{len(job.stages)} stage{'s' if len(job.stages) > 1 else ''}"
        raise UsageError(
            f"microbatches = {job.microbatches:,} on {stages} are "
            f"too many for a plan, which lists each forward and backward: give {most:,} or fewer, with more "
            "rows each, or take several steps of fewer and add their gradients"
        )
    if not job.trains:
        ranks_of = schedule.stage_ranks if isinstance(schedule, Schedule) else None
        return forward_schedule(len(job.stages), job.microbatches, ranks_of)
    wish = schedule if schedule is not None else job.schedule
    if isinstance(wish, str):
        if wish.endswith(".csv"):
            wish = read_csv(Path(wish))
        else:
            if wish == AUTO and job.pp is not None and len(job.stages) % job.pp:
                each_one = make_schedule(PLAIN_OF_SEVERAL, job.pp, job.microbatches, virtual_stages=1)
                return of_stages(each_one, equal_groups(len(job.stages), job.pp))
            ranks, each = shared(len(job.stages), job.pp, wish)
            return make_schedule(
                PLAIN_OF_SEVERAL if wish == AUTO else wish,
                ranks,
                job.microbatches,
                virtual_stages=each,
                max_live=job.max_live,
                group=job.microbatch_group,
            )
    if not isinstance(wish, Schedule):
        raise UsageError(
            f"a schedule is a name, as '1f1b', a .csv file or a stretto Schedule, not {type(wish).__name__}"
        )
    for what, has, wants in (
        ("stages", wish.stages, len(job.stages)),
        ("microbatches", wish.microbatches, job.microbatches),
    ):
        if has != wants:
            raise UsageError(
                f"the schedule {wish.family!r} has {has} {what}, but the job has {wants}: write a "
                f"schedule for {wants} {what}, or capture with {has}"
            )
    if job.pp is not None and wish.ranks != job.pp:
        raise UsageError(
            f"the schedule {wish.family!r} is for {wish.ranks} ranks, but pp = {job.pp}: "
            f"give pp = {wish.ranks}"
        )
    idle = [rank for rank in range(wish.ranks) if not wish.stages_of(rank)]
    if idle:
        raise UsageError(
            f"rank {idle[0]} of the schedule {wish.family!r} has no stage, and so nothing to do: leave it "
            "out, or give it one"
        )
    live = max(peak_live(wish))
    if job.max_live is not None and live > job.max_live:
        raise UsageError(
            f"the schedule {wish.family!r} keeps {live} microbatches live on a stage, but max_live = "
            f"{job.max_live}: reorder it, or allow {live}"
        )
    return wish


def forms_with(job: Job, schedule: str | Schedule | None) -> tuple[list[Job], list[Schedule]]:
    """The forms of the step that this schedule can have, each with it.

    Raises as `choose_schedule` of the first where there is none.
    """
    result: list[tuple[Job, Schedule]] = []
    refused: list[UsageError] = []
    for form in forms_of(job):
        try:
            result.append((form, choose_schedule(form, schedule=schedule)))
        except UsageError as error:
            refused.append(error)
    if not result:
        raise refused[0]
    return [form for form, _ in result], [chosen for _, chosen in result]


def paired(step: Step, context: Context, *, ahead: int) -> Step:
    """The schedule in pairs (`stretto.planning.pair`)."""
    pairs = pair(step.schedule, ahead=ahead)
    if pairs is None:
        raise LeftOutError(f"no backward of {step.schedule.family!r} has a forward behind it to pair with")
    live = max(peak_live(pairs))
    if step.job.max_live is not None and live > step.job.max_live:
        raise LeftOutError(f"pairs need {live} live microbatches, and max_live is {step.job.max_live}")
    # Warm-up and cool-down of the shorter step are the same.
    short = pairs
    if step.short is not step.schedule:
        short = pair(step.short, ahead=ahead) or shorter(pairs)
    return replace(step, schedule=pairs, short=short, overlap="window")


def one_window(step: Step, context: Context) -> Step:
    """All actions of a rank in one window."""
    joined = full(step.schedule)
    if joined is None:
        raise LeftOutError
    live, most = max(peak_live(joined)), step.job.max_live
    if most is not None and live > most <= max(peak_live(apart(joined))):
        # As few as in the schedule's own order leave a search nothing to choose from.
        raise LeftOutError(f"one window a rank may keep {live} live microbatches, and max_live is {most}")
    return replace(step, schedule=joined, short=joined, overlap="window")


def shorter(schedule: Schedule) -> Schedule:
    """The schedule by which steps are compared: of the first microbatches, at least 8; itself unless that is
    much less. Those of its slots that lose an action to it keep the rest."""
    count = max(8, ENOUGH * schedule.ranks)
    if schedule.microbatches <= 1.5 * count:
        return schedule
    return first_microbatches(schedule, count)


def of_short(step: Step) -> str:
    """For a time of the shorter step, of how many microbatches it is; "" where that is the step itself."""
    if step.short is step.schedule:
        return ""
    return f" for {step.short.microbatches} of {step.schedule.microbatches} microbatches"
