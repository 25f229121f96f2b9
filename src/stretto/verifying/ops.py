"""Proves that ops are what they say of themselves, by the schemas of the functions that they call.

1. An op computes tensors from what it is given: it reads no file, writes into no argument, and keeps nothing
   (`stretto.backend.dispatch_adapter`).
2. `random` is true of ops that draw, and of no other: what draws without it would take numbers from nowhere.
3. `alias` names the storage of a view, and nothing else has one: a value that says that it is no view may
   become a gradient as it is, and the sum would be written over what it is a view of.
4. Of a plan that was edited, what an op makes is used. Capture drops what no one needs; an op without a use
   was taken out of something: a gradient, the loss, a message. Parts of tuples of the forward may be left, as
   in what is computed again; each is taken once. A view makes nothing by itself.

What this PyTorch does not know is left alone: it cannot run either.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.backend.dispatch_adapter import draws, overload, refused, returns_view
from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, results_of
from stretto.ir.plan import Plan
from stretto.ir.program import CHUNK, GETITEM, Job, Op, Ref, Stage
from stretto.verifying.fault import Fault

AGAIN = "Capture the step again"


def op_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ops say of themselves. References must be sound."""
    result = [fault for stage in plan.job.stages for fault in _in_stage(plan.job, stage, plan.edited)]
    for key, count in (("count", plan.job.count), ("mean_over", plan.job.mean_over)):
        made = {op.name: op for op in count.ops} if count is not None else {}
        for op in made.values():
            result += [Fault(None, f"job.{key}, {op.name}", what, AGAIN) for what in _said(op, made)]
    return result


def _in_stage(job: Job, stage: Stage, edited: bool) -> Iterator[Fault]:
    made = {op.name: op for op in stage.all_ops}
    unused, taken = _unused(job, stage) if edited else set(), dict[tuple[str, int], str]()
    for phase, ops in stage.ops.items():
        for op in ops:
            where = f"stage {stage.index}, {phase.value}, {op.name}"
            for what in _said(op, made):
                yield Fault(None, where, what, AGAIN)
            if op.target == GETITEM and taken.setdefault((op.args[0].name, op.args[1]), op.name) != op.name:
                first = taken[op.args[0].name, op.args[1]]
                what = f"takes part {op.args[1]} of {op.args[0].name}, as {first} does"
                yield Fault(None, where, what, "Take each part once")
            if op.name in unused:
                what = f"{op.target} makes what no one uses"
                yield Fault(
                    None, where, what, "Name it where it belongs (a gradient, the loss), or drop the op"
                )


def _said(op: Op, made: dict[str, Op]) -> Iterator[str]:
    """Rules 1 to 3 of one op. made: the stage's ops by name."""
    first = next((arg.name for arg in op.args if isinstance(arg, Ref)), None)
    source = made.get(first) if first is not None else None
    root = source.alias if source is not None and source.alias is not None else first
    if op.target == GETITEM:
        view = source is not None and source.alias is not None
    elif op.target == CHUNK:
        view = True
    else:
        function = overload(op.target)
        if function is None:
            return
        if why := refused(function):
            yield f"calls {op.target}, which is no op of a program: {why}"
            return
        drawn = draws(function, op.args, dict(op.kwargs))
        if drawn != op.random:
            does = "draws" if drawn else "does not draw"
            yield f"{op.target} {does} at random, but the plan says otherwise"
        view = first is not None and returns_view(function)
    if op.alias != (root if view else None):
        is_view = f"is a view of {root}" if view else "is no view"
        yield f"{op.target} {is_view}, but the plan says that it is {op.alias or 'none'}"


def _unused(job: Job, stage: Stage) -> set[str]:
    """Ops of PyTorch of which no one uses what they make (rule 4)."""
    used = {edge.value for edge in job.edges if edge.source == stage.index}
    for phase in PHASES:
        used.update(results_of(job, stage.index, phase))
    ops = {op.name: op for phase in PHASES for op in stage.ops[phase]}
    waiting = [name for name in used if name in ops]
    while waiting:
        for name in ops[waiting.pop()].uses:
            if name not in used:
                used.add(name)
                if name in ops:
                    waiting.append(name)
    again = {op.name for op in stage.ops[Phase.F]} | {name for name, op in ops.items() if op.repeats}
    return {
        name
        for name, op in ops.items()
        if name not in used and op.alias is None
        if op.target.startswith("aten.") or (op.target == GETITEM and not again & {name, op.args[0].name})
    }
