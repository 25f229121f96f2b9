"""Proves that what is computed again is what was computed before: `Op.repeats` names an op of F, and the op
that has it does the same to the same values.

A random op draws the numbers of the op that it repeats. With another name it would draw others, and the
backward would belong to another forward; nothing would be missing, and no message would tell.

An op repeats another of its stage if target, results and all arguments are equal, where an argument may also
be what repeats the original's.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.plan import Plan
from stretto.ir.program import Arg, Op, Ref, Stage
from stretto.verifying.fault import Fault


def repeat_faults(plan: Plan) -> list[Fault]:
    """Every fault of repeated ops. References must be sound."""
    return [fault for stage in plan.job.stages for fault in _in_stage(plan, stage)]


def _in_stage(plan: Plan, stage: Stage) -> Iterator[Fault]:
    made = {op.name: op for op in stage.ops[Phase.F]}
    again = {op.name: op.repeats for phase in PHASES[1:] for op in stage.ops[phase] if op.repeats}
    repeating = [(phase, op) for phase in PHASES for op in stage.ops[phase] if op.repeats]
    for phase, op in repeating:
        fix = "Name the op of F that it computes again, or none"
        if phase is Phase.F:
            what, fix = "but stands in F itself", "Take it out of F"
        elif op.repeats not in made:
            what = f"which stage {stage.index} does not have in F"
        else:
            difference = _difference(made[op.repeats], op, again)
            what = f"but {difference}" if difference else ""
        if what:
            where = f"stage {stage.index}{phase}, {op.name}"
            yield Fault(plan.rank_of(stage.index), where, f"repeats {op.repeats}, {what}", fix)


def _difference(first: Op, op: Op, again: dict[str, str]) -> str:
    """In words, how a repeated op differs from the first; "" if it does not."""
    if op.target != first.target:
        return f"is {op.target} instead of {first.target}"
    if op.outputs != first.outputs:
        return f"gives {', '.join(map(str, op.outputs))} instead of {', '.join(map(str, first.outputs))}"
    if op.random != first.random:
        return f"{'draws' if op.random else 'does not draw'} at random"

    def same(old: Arg, new: Arg) -> bool:
        if isinstance(old, tuple) and isinstance(new, tuple):
            return len(old) == len(new) and all(map(same, old, new))
        if isinstance(old, Ref) and isinstance(new, Ref):
            return new.name == old.name or again.get(new.name) == old.name
        return type(old) is type(new) and repr(old) == repr(
            new
        )  # NaN is not equal to itself, and 0.0 is to -0.0

    if not same((first.args, first.kwargs), (op.args, op.kwargs)):
        return "is given other arguments"
    return ""
