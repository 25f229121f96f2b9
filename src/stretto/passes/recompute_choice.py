"""Which ops the backward computes again: all, what is cheap, or as many as a limit of memory asks for.

    full        All ops of blocks (`stretto.passes.recompute_blocks`) whose results the backward needs are
                repeated from the block's inputs (Chen et al. 2016, arXiv 1604.06174).
    selective   Steps (`stretto.passes.recompute_steps`) until the time that they add to a stage reaches
                `SELECTIVE_SHARE` of it. Products with weights and collectives are not repeated: what remains
                are elementwise ops and the attention's core (Korthikanti et al. 2022, arXiv 2205.05198).
    gathers     All-gathers of the forward with what only moves their results, so that a rank keeps its slice
                of a sequence (Korthikanti et al., section 4.2.2). The second collective is one more that an
                order of ops can hide, under the products of the backward.
    a limit     Steps, nothing left out; of each rank as few as bring its peak under the limit, by bisection.

Touches `stretto.ir`, and takes the peaks of a plan from its caller. `stretto.passes.recompute` repeats what
is chosen here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Phase, Schedule
from stretto.ir.collectives import ALL_GATHER
from stretto.ir.costs import Costs
from stretto.ir.flow import PHASES
from stretto.ir.program import Job, Stage
from stretto.passes.recompute import forget, repeat, storages
from stretto.passes.recompute_blocks import Blocks, borders
from stretto.passes.recompute_steps import StageChoice, merged
from stretto.passes.step import Context, Step

SELECTIVE_SHARE = 0.05
"""Time that "selective" may add to a stage's ops. Assumed: elementwise ops and the attention's core of a
large transformer take of this order, each product with a weight more."""

PROBES = 64
"""The bisection for a limit ends when it is this share of a rank's steps from the fewest. Assumed: a plan is
made for each probe, and a 64th of the added time is not worth another."""

MOVES = ("aten.clone.default",)
"""Copies, which allocate but compute nothing."""

WORDS = ("none", "selective", "full", "gathers")

Peaks = Callable[[Job], Sequence[int]]
"""The most bytes that each rank holds when the job is planned."""


def recomputed(step: Step, context: Context) -> Step:
    """The step whose backward computes again what `job.recompute` says.

    Raises PlanError for a limit that cannot be kept, UsageError for an unknown choice.
    """
    try:
        return _recomputed(step, context)
    except PlanError:
        if step.asked == "off":
            raise
        # Overlap is an upper limit, and buffers of what is waited for at once are held for less long.
        return _recomputed(replace(step, asked="off"), context)


def _recomputed(step: Step, context: Context) -> Step:
    job = step.job

    def peaks(made: Job) -> Sequence[int]:
        return context.peaks(replace(step, job=made))

    made = recompute(job, job.recompute, context.costs_of(job), step.schedule, peaks)
    limits = [limit for limit in (job.recompute, step.max_bytes) if isinstance(limit, int)]
    return replace(step, job=made, max_bytes=min(limits, default=None))


def recompute(
    job: Job,
    choice: str | int,
    costs: Costs,
    schedule: Schedule,
    peak_bytes: Peaks,
) -> Job:
    """The job whose backward computes again what `choice` says.

    choice: "none", "selective", "full", "gathers", or the most bytes that a rank may hold. A job that was so
    changed before is taken as it was before that. costs: those of the job. schedule: which rank has which
    stages. peak_bytes: asked for a limit only.

    Raises PlanError that names the ranks that cannot keep a limit and the least that they hold, UsageError
    for an unknown choice.
    """
    job = forget(job)
    if choice == "none" or not job.trains:
        return job
    if choice == "gathers":
        return repeat(job, {stage.index: gathers(stage) for stage in job.stages})
    blocks = Blocks(job)
    if choice == "full":
        return repeat(job, {stage.index: _full(stage, blocks) for stage in job.stages})
    if choice == "selective":
        return repeat(job, {stage.index: _selective(stage, blocks, costs) for stage in job.stages})
    if isinstance(choice, str):
        words = ", ".join(map(repr, WORDS))
        raise UsageError(f"recompute = {choice!r}: give {words} or a number of bytes that a rank may hold")
    return _within(job, choice, blocks, costs, schedule, peak_bytes)


def gathers(stage: Stage) -> list[str]:
    """The ops of a stage's forward that gather, and that move what is gathered: views, and copies into
    another order."""
    found: dict[str, None] = {}
    for op in stage.ops[Phase.F]:
        # A wait is a view of its start.
        moves = len(op.uses) == 1 and op.uses[0] in found and (op.alias is not None or op.target in MOVES)
        if op.target == ALL_GATHER.target or moves:
            found[op.name] = None
    return list(found)


def _full(stage: Stage, blocks: Blocks) -> list[str]:
    """All ops of blocks but those that make what another block reads."""
    forward = stage.ops[Phase.F]
    root = storages(forward)
    kept = borders(stage, blocks, root)
    return [op.name for op in forward if blocks.of(op) and root[op.name] not in kept]


def _selective(stage: Stage, blocks: Blocks, costs: Costs) -> set[str]:
    """Step 3 for one stage."""
    # Views and waits may be without a cost.
    total_us = sum(
        costs.op_us.get((stage.index, op.name), 0.0) for phase in PHASES for op in stage.ops[phase]
    )
    left_us = SELECTIVE_SHARE * total_us
    again: set[str] = set()
    for step in merged(StageChoice(stage, blocks, costs, cheap_only=True).steps()):
        left_us -= step.us
        if left_us < 0:
            break
        again |= step.ops
    return again


def _within(job: Job, limit: int, blocks: Blocks, costs: Costs, schedule: Schedule, peak_bytes: Peaks) -> Job:
    """The limit: of each rank's steps the fewest with which its peak is not above it."""
    found = [StageChoice(stage, blocks, costs, cheap_only=False).steps() for stage in job.stages]
    steps = [
        list(merged([block for stage in schedule.stages_of(rank) for block in found[stage]]))
        for rank in range(schedule.ranks)
    ]
    lowest: list[int] = []

    def made(counts: Sequence[int]) -> Job:
        again: dict[int, set[str]] = {stage.index: set() for stage in job.stages}
        for rank, count in enumerate(counts):
            for step in steps[rank][:count]:
                again[step.stage] |= step.ops
        return repeat(job, again)

    def over(counts: Sequence[int]) -> list[bool]:
        peaks = peak_bytes(made(counts))
        lowest[:] = [min(pair) for pair in zip(lowest or peaks, peaks, strict=True)]
        return [peak > limit for peak in peaks]

    # below[rank] steps are too few, enough[rank] are not.
    below = [0] * schedule.ranks
    too_much = over(below)
    if not any(too_much):
        return job
    enough = [len(steps[rank]) if much else 0 for rank, much in enumerate(too_much)]
    cannot = over(enough)
    for part in (1, 2, 3):
        # Repeating all of it at once may itself need the most.
        if any(cannot):
            tried = [len(steps[r]) * part // 4 if cannot[r] else enough[r] for r in range(schedule.ranks)]
            still = over(tried)
            enough = [
                t if c and not s else e for e, t, c, s in zip(enough, tried, cannot, still, strict=True)
            ]
            cannot = [c and s for c, s in zip(cannot, still, strict=True)]
    if any(cannot):
        raise PlanError(
            f"cannot keep recompute = {limit:,} bytes a rank",
            [
                f"rank {rank} holds at least {lowest[rank]:,} bytes, even when its backward computes again "
                "all that it can. Allow as much, or use more stages, smaller microbatches or a schedule with "
                "fewer live microbatches"
                for rank in range(schedule.ranks)
                if cannot[rank]
            ],
        )
    while any(e - b > max(1, len(s) // PROBES) for b, e, s in zip(below, enough, steps, strict=True)):
        tried = [(b + e) // 2 for b, e in zip(below, enough, strict=True)]
        for rank, much in enumerate(over(tried)):
            if much:
                below[rank] = tried[rank]
            else:
                enough[rank] = tried[rank]
    # When a message leaves depends on other ranks too, and with it how long its buffer lives.
    for _ in range(PROBES):
        too_much = over(enough)
        if not any(too_much):
            break
        enough = [
            min(len(s), e + 1 + len(s) // PROBES) if much else e
            for s, e, much in zip(steps, enough, too_much, strict=True)
        ]
    return made(enough)
