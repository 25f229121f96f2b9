"""Communications that start in one window and are waited for in a later one of the same stage and microbatch.

A job's programs say in which action an op runs. Two moves let a communication go on between actions, where
each is a program's own; results stay the same, and memory is used for longer.

    1. Where W runs as an action of its own: a start of W whose input is there by the end of I is I's last op.
       What W waits for has then been under way since. A value that arrives for W only may come later.
    2. A wait that nothing of its own program needs goes where its result is first needed; views of the result
       go with it.

The plan shows it: the start is an item of one window, its `comm.wait` of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.ir.action import Phase, Schedule
from stretto.ir.flow import PHASES, defined, results_of
from stretto.ir.program import STARTS, WAIT, Job, Op, Stage

Programs = dict[Phase, tuple[Op, ...]]


def split_stages(schedule: Schedule) -> frozenset[int]:
    """Stages of which W is an action of its own, for any microbatch."""
    actions = (action for rank in range(schedule.ranks) for action in schedule.actions(rank))
    return frozenset(action.stage for action in actions if action.phase is Phase.W)


def across(job: Job, split: frozenset[int]) -> Job:
    """The job with these moves; the job itself where there is nothing to move. split: as `split_stages`."""
    stages = tuple(_moved(job, stage, stage.index in split) for stage in job.stages)
    if all(new is old for new, old in zip(stages, job.stages, strict=True)):
        return job
    return replace(job, stages=stages)


def _moved(job: Job, stage: Stage, split: bool) -> Stage:
    programs = {phase: tuple(stage.ops[phase]) for phase in PHASES}
    if split:
        programs = _starts_earlier(job, stage.index, programs)
    programs = _waits_later(job, stage.index, programs, split)
    return stage if _same(programs, stage.ops) else Stage(stage.index, programs)


def _same(programs: Programs, ops: Mapping[Phase, tuple[Op, ...]]) -> bool:
    return all(tuple(ops[phase]) == programs[phase] for phase in PHASES)


def _starts_earlier(job: Job, stage: int, programs: Programs) -> Programs:
    """Step 1."""
    later = {*defined(programs[Phase.W])}
    later |= {edge.value for edge in job.edges if edge.target == stage and edge.user_phase is Phase.W}
    ready = [op for op in programs[Phase.W] if op.target in STARTS and later.isdisjoint(op.uses)]
    rest = tuple(op for op in programs[Phase.W] if op not in ready)
    return {**programs, Phase.I: (*programs[Phase.I], *ready), Phase.W: rest}


def _waits_later(job: Job, stage: int, programs: Programs, split: bool) -> Programs:
    """Step 2. I and W are two actions only where the schedule splits them."""
    leaves = {edge.value for edge in job.edges if edge.source == stage}
    result = dict(programs)
    for phase in PHASES[:2]:
        if phase is Phase.I and not split:
            continue
        used_here: set[str] = set()
        kept = leaves | results_of(job, stage, phase).keys()
        goes: list[Op] = []
        stays: list[Op] = []
        for op in reversed(result[phase]):
            movable = op.target == WAIT or (op.alias is not None and _of_wait(op, result[phase]))
            if movable and op.name not in used_here | kept and _reader(result, phase, op.name, goes):
                goes.append(op)
            else:
                stays.append(op)
                used_here.update(op.uses)
        if not goes:
            continue
        goes.reverse()
        result[phase] = tuple(reversed(stays))
        first = next(
            later
            for later in PHASES[PHASES.index(phase) + 1 :]
            if any(op.name in other.uses for op in goes for other in result[later])
        )
        result[first] = (*goes, *result[first])
    return result


def _of_wait(op: Op, ops: tuple[Op, ...]) -> bool:
    """Whether a view shows the result of a wait of the program."""
    waits = {other.uses[0] for other in ops if other.target == WAIT}
    return op.alias in waits


def _reader(programs: Programs, phase: Phase, name: str, goes: list[Op]) -> bool:
    """Whether a later program, or something that goes there, reads the value."""
    later = PHASES[PHASES.index(phase) + 1 :]
    return any(name in op.uses for op in goes) or any(
        name in op.uses for sub in later for op in programs[sub]
    )
