"""Proves that axes and shards fit together.

Parameters that are spread name real axes and dims; copies of one tensor are spread alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.axes import AXES, Sums, sums_of
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Parameter
from stretto.verifying.fault import Fault


def sharding_faults(plan: Plan) -> list[Fault]:
    """Every fault of axes, shards and ties. References must be sound."""
    result = list(_axes(plan.job))
    first: dict[str, Parameter] = {}
    for parameter in plan.job.parameters:
        result += _parameter(plan.job, parameter)
        result += _tie(first.setdefault(parameter.tied_to, parameter), parameter)
    return result


def _axes(job: Job) -> Iterator[Fault]:
    names = [axis for axis, _ in job.axes]
    if names != [axis for axis in AXES[1:] if axis in names]:
        known = ", ".join(AXES[1:])
        yield Fault(None, "axes", f"are {', '.join(names)}", f"Name each once, of {known} and in that order")
    for axis, size in job.axes:
        if size < 1:
            yield Fault(None, f"axis {axis}", f"has {size} ranks", "An axis has at least one")


def _parameter(job: Job, parameter: Parameter) -> Iterator[Fault]:
    """What is wrong with a parameter's shards, and with the axes along which its gradient is summed."""
    result = (*_shards(job, parameter), *_partial(job, parameter))
    yield from (Fault(None, f"parameter {parameter.name}", what, fix) for what, fix in result)


def _shards(job: Job, parameter: Parameter) -> Iterator[tuple[str, str]]:
    axes, shape = dict(job.axes), parameter.spec.shape
    for shard in parameter.shards:
        if shard.axis not in axes:
            what = f"is spread over {shard.axis!r}, which is no axis of the job"
            yield what, f"The job has {', '.join(axes) or 'none'} beside pp"
        if not 0 <= shard.dim < len(shape):
            yield f"is spread along dim {shard.dim}, but is {parameter.spec}", "Name a dim it has"
        elif shard.blocks < 1 or shape[shard.dim] % shard.blocks:
            rows = f"{shape[shard.dim]} rows along dim {shard.dim}"
            what = f"has {rows}, not {shard.blocks} equal blocks of them"
            yield what, "Name as many blocks as the parameter has"
        # Ranks that hold the same part are as many for each part, and add up their gradients.
        held = f"has parts that {shard.copies} ranks of {shard.axis} hold each"
        size = axes.get(shard.axis, 1)
        if shard.copies < 1 or size % shard.copies:
            yield f"{held}, but it has {size} ranks", f"Name a number that divides {size}"
        elif shard.copies > 1 and parameter.grads and shard.axis not in parameter.partial:
            yield f"{held}, whose gradients are not summed", f"Name {shard.axis} in `partial`"
    spread = [shard.axis for shard in parameter.shards]
    for axis in sorted({axis for axis in spread if spread.count(axis) > 1}):
        yield f"is spread over {axis} twice", "Keep one shard an axis"


def _partial(job: Job, parameter: Parameter) -> Iterator[tuple[str, str]]:
    shards = {shard.axis: shard for shard in parameter.shards}
    for axis in parameter.partial:
        if axis not in dict(job.axes) or sums_of(axis) is Sums.ALL:
            what = f"has gradients that are parts along {axis!r}, which is no axis that splits a sample"
            yield (
                what,
                "Name axes of the job; over dp and ep every gradient is summed that is not sharded over them",
            )
        elif axis in shards and shards[axis].copies == 1:
            what = f"is spread over {axis}, so gradients along it belong to different rows"
            yield what, f"Take {axis} out of `partial`, or out of `shards`"
    if len(set(parameter.partial)) < len(parameter.partial):
        yield f"names an axis of `partial` twice: {list(parameter.partial)}", "Keep one"


def _tie(first: Parameter, parameter: Parameter) -> Iterator[Fault]:
    """Copies of one tensor are summed element by element."""

    def whole(of: Parameter) -> tuple[object, ...]:
        return of.spec, of.own_dtype, of.shards

    where = f"parameter {parameter.name}"
    if whole(first) != whole(parameter):
        kinds = f"({parameter.spec}, {_spread(parameter)}; {first.spec}, {_spread(first)})"
        what = f"is one tensor with {first.name}, but is spread or shaped differently {kinds}"
        yield Fault(None, where, what, "Spread tied parameters alike")
    if first.grads and parameter.grads and set(first.partial) != set(parameter.partial):
        axes = f"({list(parameter.partial)}; {list(first.partial)})"
        what = f"is one tensor with {first.name}, but their gradients are parts along different axes {axes}"
        yield Fault(None, where, what, "Give both one style")


def _spread(parameter: Parameter) -> str:
    return " and ".join(f"{s.axis} along dim {s.dim}" for s in parameter.shards) or "not spread"
