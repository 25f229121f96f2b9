"""Proves that an op fits the earlier op that it continues: one that it computes again, and one whose saved
results it reads.

Repeats: `Op.repeats` names an op of F, and the op that has it does the same to the same values: target,
results and all arguments are equal, where an argument may also be what repeats the original's. A random op
draws the numbers of the op that it repeats; with another name it would draw others, and the backward would
belong to another forward.

Saved results: a kernel that works back through a norm, a pool or attention takes the statistics, places or
sums that the forward's kernel has left, and trusts that they are of the shape and meaning that its other
arguments say. So where `X_backward` reads a part of what X has made, all arguments that both functions take
by one name are the same: numbers, flags and lists equal, tensors there in both or in none, and of one shape.
And the flags of an op by itself fit what it is given, and what it makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.backend.dispatch_adapter import arguments_of
from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.placements import IN_DTYPE, SIDE_BY_SIDE, SPLITS
from stretto.ir.plan import Plan
from stretto.ir.prices import Specs, specs_of
from stretto.ir.program import GETITEM, SHARD, STARTS, Arg, Op, Ref, Stage
from stretto.passes.rows import CAST
from stretto.verifying.fault import Fault
from stretto.verifying.pieces import Pieces, pieces_of


def repeat_faults(plan: Plan) -> Iterator[Fault]:
    """Every fault of repeated ops. References must be sound."""
    for stage in plan.job.stages:
        made = {op.name: op for op in stage.ops[Phase.F]}
        whose = _gathered(plan, stage)
        again = {op.name: op.repeats for phase in PHASES[1:] for op in stage.ops[phase] if op.repeats}
        repeating = [(phase, op) for phase in PHASES for op in stage.ops[phase] if op.repeats]
        for phase, op in repeating:
            fix = "Name the op of F that it computes again, or none"
            if phase is Phase.F:
                what, fix = "but is in F itself", "Take it out of F"
            elif op.repeats not in made:
                what = f"which stage {stage.index} does not have in F"
            else:
                difference = _differs(made[op.repeats], op, again, whose)
                what = f"but {difference}" if difference else ""
            if what:
                where = f"stage {stage.index}{phase}, {op.name}"
                yield Fault(plan.rank_of(stage.index), where, f"repeats {op.repeats}, {what}", fix)


def _gathered(plan: Plan, stage: Stage) -> dict[str, object]:
    """What a stage gathers of parameters, and views of it -> of whom it is, and its shape: each program that
    reads one gathers it."""
    made: dict[str, Pieces] = {SHARD + p.kept_as: ((p.kept_as,),) for p in plan.job.parameters if p.is_made}
    result: dict[str, object] = {}
    moving = (*STARTS, GETITEM, SIDE_BY_SIDE, IN_DTYPE, CAST, *SPLITS)
    for op in (op for phase in PHASES for op in stage.ops[phase]):
        if (op.alias is not None or op.target in moving) and made.keys() & set(op.uses):
            made[op.name] = pieces_of(op, made)
            result[op.name] = made[op.name], op.spec
    return result


def _differs(first: Op, op: Op, again: dict[str, str], whose: dict[str, object]) -> str:
    """In words, how a repeated op differs from the first; "" if it does not. whose: by `_gathered`."""
    for what, said, was in (
        ("calls", op.target, first.target),
        ("gives", ", ".join(map(str, op.outputs)), ", ".join(map(str, first.outputs))),
        ("has random =", op.random, first.random),
    ):
        if said != was:
            return f"{what} {said} instead of {was}"

    def same(old: Arg, new: Arg) -> bool:
        if isinstance(old, tuple) and isinstance(new, tuple):
            return len(old) == len(new) and all(map(same, old, new))
        if isinstance(old, Ref) and isinstance(new, Ref):
            gathered = old.name in whose and whose[old.name] == whose.get(new.name)
            return gathered or new.name == old.name or again.get(new.name) == old.name
        # NaN is not equal to itself, and 0.0 is to -0.0.
        return type(old) is type(new) and repr(old) == repr(new)

    if not same((first.args, first.kwargs), (op.args, op.kwargs)):
        return "is given other arguments"
    return ""


SAME = {"train": "training"}
"""Names of a backward's arguments that are another in the forward."""


def saved_faults(plan: Plan) -> list[Fault]:
    """Every op whose saved results are of another call. References must be sound."""
    specs = specs_of(plan.job)
    return [fault for stage in plan.job.stages for fault in _in_stage(stage, specs)]


def _in_stage(stage: Stage, specs: Specs) -> Iterator[Fault]:
    made = {op.name: op for phase in PHASES for op in stage.ops[phase]}
    for phase in PHASES:
        for op in stage.ops[phase]:
            if what := _own(op):
                where = f"stage {stage.index}, {phase.value}, {op.name}"
                yield Fault(None, where, f"{op.target} {what}", "Capture the step again")
            parts = (made[name] for name in op.uses if name in made and made[name].target == GETITEM)
            for name in dict.fromkeys(part.args[0].name for part in parts):
                works_back = name in made and _works_back(made[name], op)
                what = _difference(made[name], op, specs) if works_back else ""
                if what:
                    where = f"stage {stage.index}, {phase.value}, {op.name}"
                    said = f"{op.target} reads what {name} has saved, but {what}"
                    yield Fault(None, where, said, "Capture the step again")


def _own(op: Op) -> str:
    """Why the op's own flags do not fit what it is given and makes; "" where they do."""
    given = arguments_of(op)
    trains = given.get("training", given.get("train"))
    if trains is False and "running_mean" in given and not isinstance(given["running_mean"], Ref):
        return "normalizes by running statistics, and is given none"
    mask = given.get("output_mask")
    if isinstance(mask, tuple) and len(mask) == len(op.outputs):
        for at, (asked, made) in enumerate(zip(mask, op.outputs, strict=True)):
            if made is not None and not asked:
                return f"is not asked for part {at}, which the plan says is {made}"
    return ""


def _works_back(forward: Op, backward: Op) -> bool:
    """Whether one is, by its name, the backward of the other."""
    first, name = (op.target.split(".")[1] if "." in op.target else "" for op in (forward, backward))
    stem, is_backward, _ = name.partition("_backward")
    return bool(is_backward and first) and "_backward" not in first and (stem in first or first in stem)


def _difference(forward: Op, backward: Op, specs: Specs) -> str:
    """In words, an argument that the two do not have in common; "" if there is none."""
    taken, given = arguments_of(forward), arguments_of(backward)
    for name, value in given.items():
        first = taken.get(SAME.get(name, name), value)
        tensors = isinstance(first, Ref), isinstance(value, Ref)
        if all(tensors):
            shapes = [specs[one.name].shape if one.name in specs else None for one in (first, value)]
            same = None in shapes or shapes[0] == shapes[1]
        else:
            same = not any(tensors) and first == value
        if not same:
            return f"its {name!r} is {_shown(value)}, and there it was {_shown(first)}"
    return ""


def _shown(value: Any) -> str:
    return value.name if isinstance(value, Ref) else str(value)
