"""Names and forms of programs that run once a step that point at nothing, or cannot be read."""

from __future__ import annotations

from stretto.ir.action import ONCE_PHASES
from stretto.ir.broken import Broken
from stretto.ir.flow import made_parameters
from stretto.ir.plan import Plan
from stretto.ir.program import FREE, GRAD, SHARD, STEP_LOSS, WAIT, Op, Ref


def broken_once(found: Broken, plan: Plan) -> None:
    """Programs that run once a step: collectives over a communicator of the plan, what lives over the step,
    and values that an op before makes."""
    made = made_parameters(plan.job)
    changed = {GRAD + parameter.name for parameter in plan.job.parameters} | {STEP_LOSS}
    given = changed | {SHARD + parameter.tied_to for parameter in plan.job.parameters if parameter.is_made}
    lanes = {communicator.name for communicator in plan.communicators}
    for at, stage in enumerate(plan.job.stages):
        for phase in ONCE_PHASES:
            before: set[str] = set()
            for k, op in enumerate(stage.ops.get(phase, ())):
                path = f"job.stages[{at}].ops.{phase}[{k}]"
                what = f"{op.name}: {op.target} cannot be read with these arguments and results"
                if not found.unless(_has_form(op), path, what):
                    continue
                for name in op.uses:
                    found.points(path, name, given | before, f"{op.name}: there is no {{!r}} before it")
                if op.writes is not None:
                    found.points(path, op.writes, changed | made, f"{op.name}: there is no {{!r}} to write")
                if op.kind is not None:
                    found.points(path, op.lane, lanes, f"{op.name}: there is no communicator {{!r}}")
                before.add(op.name)


def _has_form(op: Op) -> bool:
    """Whether what starts, awaits or frees has arguments and results of its form."""
    if op.target == FREE:
        return op.writes is not None and not (op.args or op.kwargs or op.outputs)
    if op.kind is None and op.target != WAIT:
        return True
    match op.args:
        case (Ref(), *how, str(), int(size)) if op.kind is not None:
            reductions = [str] * bool(op.kind.reductions)
            right = type(size) is int and list(map(type, how)) == reductions and op.writes is None
        case _:
            right = op.target == WAIT and list(map(type, op.args)) == [Ref]
    return right and op.spec is not None and not op.kwargs
