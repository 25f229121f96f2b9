"""Names and forms of programs that run once a step that point at nothing, or cannot be read."""

from __future__ import annotations

from stretto.ir.action import ONCE_PHASES
from stretto.ir.broken import Broken
from stretto.ir.flow import made_parameters
from stretto.ir.plan import Plan
from stretto.ir.program import FREE, GRAD, PARAM, SHARD, STEP_LOSS, STEP_NORM, WAIT, Op, Ref
from stretto.ir.updates import SQUARES, UPDATE, is_squares, is_update


def broken_once(found: Broken, plan: Plan) -> None:
    """Programs that run once a step: collectives over a communicator of the plan, what lives over the step,
    and values that an op before makes."""
    made = made_parameters(plan.job)
    changed = {GRAD + parameter.name for parameter in plan.job.parameters} | {STEP_LOSS, STEP_NORM}
    kept = {SHARD + p.kept_as if p.is_made else PARAM + p.name for p in plan.job.parameters}
    given = changed | {name for name in kept if name.startswith(SHARD)}
    lanes = {communicator.name for communicator in plan.communicators}
    for at, stage in enumerate(plan.job.stages):
        for phase in ONCE_PHASES:
            before: set[str] = set()
            for k, op in enumerate(stage.ops.get(phase, ())):
                path = f"job.stages[{at}].ops.{phase}[{k}]"
                what = f"{op.name}: {op.target} cannot be read with these arguments and results"
                if not found.unless(_has_form(op), path, what):
                    continue
                updates = op.target == UPDATE  # alone changes what the rank keeps
                reads, writes = (
                    (changed | kept | before, kept) if updates else (given | before, changed | made)
                )
                for name in op.uses:
                    found.points(path, name, reads, f"{op.name}: there is no {{!r}} before it")
                for name in op.writes:
                    found.points(path, name, writes, f"{op.name}: there is no {{!r}} to write")
                if op.kind is not None:
                    found.points(path, op.lane, lanes, f"{op.name}: there is no communicator {{!r}}")
                before.add(op.name)


def _has_form(op: Op) -> bool:
    """Whether what starts, awaits, frees or updates has arguments and results of its form."""
    if op.target == FREE:
        return bool(op.writes) and not (op.args or op.kwargs or op.outputs)
    if op.target == UPDATE:
        return is_update(op)
    if op.target == SQUARES:
        return is_squares(op)
    if op.kind is None and op.target != WAIT:
        return len(op.writes) <= 1
    match op.args:
        case (Ref(), *how, str(), int(size)) if op.kind is not None:
            reductions = [str] * bool(op.kind.reductions)
            right = type(size) is int and list(map(type, how)) == reductions and not op.writes
        case _:
            right = op.target == WAIT and list(map(type, op.args)) == [Ref]
    return right and len(op.writes) <= 1 and op.spec is not None and not op.kwargs
