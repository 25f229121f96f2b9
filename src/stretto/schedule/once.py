"""What a pipeline rank does once a step, besides its actions: programs of its first stage (`ONCE_PHASES`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.action import AFTER, BEFORE, ONCE_PHASES, Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.flow import PHASES
from stretto.ir.plan import LOSS, NORM, Communicator
from stretto.ir.program import WAIT, Job, Op, Stage
from stretto.ir.transfers import tied_ranks
from stretto.schedule.sums import TIED, reduces_loss, reductions_of
from stretto.schedule.unshard import gathers_of


def with_once(job: Job, schedule: Schedule) -> Job:
    """The job whose stages, placed as in `schedule`, have the programs of their pipeline ranks."""
    tied = tied_ranks(job, schedule.stage_ranks)
    job = without_once(job)
    stages = list(job.stages)
    for pp_rank in range(schedule.ranks):
        kept = schedule.stages_of(pp_rank)
        if kept:
            programs = {
                BEFORE: tuple(gathers_of(job, kept, pp_rank)),
                AFTER: tuple(reductions_of(job, schedule, pp_rank, tied)),
            }
            first = stages[kept[0]]
            stages[kept[0]] = Stage(first.index, {**first.ops, **{p: o for p, o in programs.items() if o}})
    return replace(job, stages=tuple(stages))


def placed(job: Job, stage_ranks: Sequence[int]) -> Schedule:
    """A schedule of which only the placement counts."""
    nothing: tuple[tuple[()], ...] = ((),) * (1 + max(stage_ranks))
    return Schedule("", len(stage_ranks), job.microbatches, tuple(stage_ranks), nothing)


def has_once(job: Job) -> bool:
    """Whether the job has programs that run once a step."""
    return any(phase in stage.ops for stage in job.stages for phase in ONCE_PHASES)


def without_once(job: Job) -> Job:
    """The job as it is captured, without the programs that a plan adds."""
    if not has_once(job):
        return job
    stages = (Stage(s.index, {phase: s.ops[phase] for phase in PHASES}) for s in job.stages)
    return replace(job, stages=tuple(stages))


def communicators_of(job: Job, schedule: Schedule) -> tuple[Communicator, ...]:
    """All communicators, in the one order in which every rank creates them: one for each pair of pipeline
    ranks and direction with messages, `loss` where ranks do not have all of it, `norm` likewise, one for each
    tied gradient, and one for each axis other than pp."""
    pairs = sorted({(schedule.stage_ranks[e.source], schedule.stage_ranks[e.target]) for e in job.edges})
    result = [Communicator(f"pp {a}>{b}", (a, b)) for a, b in pairs if a != b]
    if reduces_loss(job, schedule.ranks):
        result.append(Communicator(LOSS, tuple(range(schedule.ranks)), (PIPELINE, *job.data_axes)))
    if job.clip_norm is not None and schedule.ranks > 1:
        result.append(Communicator(NORM, tuple(range(schedule.ranks))))
    result += [
        Communicator(TIED + name, ranks)
        for name, ranks in sorted(tied_ranks(job, schedule.stage_ranks).items())
    ]
    result += [Communicator(axis, tuple(range(size)), (axis,)) for axis, size in job.axes if size > 1]
    return tuple(result)


def around_starts(program: Sequence[Op]) -> tuple[dict[str, list[Op]], dict[str, list[Op]]]:
    """Start -> the ops before it that no other start has, itself last; and its wait with what reads it, a
    start that follows from it too. "" -> what leads to no start. What of that concerns nothing but what one
    wait has changed is behind this wait."""
    leads: dict[str, list[Op]] = {}
    tails: dict[str, list[Op]] = {}
    tail_of: dict[str, str] = {}
    changed: dict[str, set[str]] = defaultdict(set)
    open_ops: list[Op] = []
    for op in program:
        waited = next((tail_of[name] for name in op.uses if name in tail_of), None)
        if op.target == WAIT:
            waited = tail_of.get(op.uses[0], op.uses[0])
        if waited is not None:
            tail_of[op.name] = waited
            tails.setdefault(waited, []).append(op)
            for name in (*op.uses, *op.writes):
                changed[name].add(waited)
            continue
        open_ops.append(op)
        if op.kind is not None:
            leads[op.name], open_ops = open_ops, []
    left: list[Op] = []
    for op in open_ops:
        names = (*op.uses, *op.writes)
        behind = {start for name in names for start in changed[name]}
        [start] = behind if len(behind) == 1 else [""]
        (tails[start] if start else left).append(op)
        for name in (*names, op.name):
            changed[name].add(start)
    return ({"": left} | leads if left else leads), tails
