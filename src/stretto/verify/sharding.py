"""Proves that axes and shards fit together, and that ranks along tp stay equal where they must.

Parameters that are spread name real axes and dims; copies of one tensor are spread alike. A gradient of which
every rank has only a part is summed, and one of which every rank has the whole is not: either mistake would
train another model, and no message would be missing. What differs between ranks is read off the programs
(`stretto.ir.varying`). May touch `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.axes import AXES, TENSOR, Sums, sums_of
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Parameter, Shard
from stretto.ir.varying import varying_in_job
from stretto.verify.fault import Fault


def sharding_faults(plan: Plan) -> list[Fault]:
    """Every fault of axes, shards and ties. References must be sound."""
    found = list(_axes(plan.job))
    first: dict[str, Parameter] = {}
    for parameter in plan.job.parameters:
        found += _parameter(plan.job, parameter)
        found += _tie(first.setdefault(parameter.tied_to, parameter), parameter)
    return found


def difference_faults(plan: Plan) -> list[Fault]:
    """Gradients, updates and a loss that are other than their parameters, buffers and readers expect.

    The programs must have no other fault.
    """
    job = plan.job
    if job.size(TENSOR) == 1:
        return []
    return list(_differences(plan, varying_in_job(job, TENSOR)))


def _axes(job: Job) -> Iterator[Fault]:
    names = [axis for axis, _ in job.axes]
    order = [axis for axis in AXES[1:] if axis in names]
    if names != order:
        yield Fault(
            None,
            "axes",
            f"are {', '.join(names)}",
            f"Name each once, of {', '.join(AXES[1:])} and in that order",
        )
    for axis, size in job.axes:
        if size < 1:
            yield Fault(None, f"axis {axis}", f"has {size} ranks", "An axis has at least one")


def _parameter(job: Job, parameter: Parameter) -> Iterator[Fault]:
    where = f"parameter {parameter.name}"
    axes = dict(job.axes)
    shape = parameter.spec.shape
    for shard in parameter.shards:
        if shard.axis not in axes:
            yield Fault(
                None,
                where,
                f"is spread over {shard.axis!r}, which is no axis of the job",
                f"The job has {', '.join(axes) or 'none'} beside pp",
            )
        if not 0 <= shard.dim < len(shape):
            yield Fault(
                None, where, f"is spread along dim {shard.dim}, but is {parameter.spec}", "Name a dim it has"
            )
        elif shard.blocks < 1 or shape[shard.dim] % shard.blocks:
            yield Fault(
                None,
                where,
                f"has {shape[shard.dim]} rows along dim {shard.dim}, not {shard.blocks} equal blocks of them",
                "Name as many blocks as the parameter has",
            )
    spread = [shard.axis for shard in parameter.shards]
    for axis in sorted({axis for axis in spread if spread.count(axis) > 1}):
        yield Fault(None, where, f"is spread over {axis} twice", "Keep one shard an axis")
    for axis in parameter.partial:
        if axis not in axes or sums_of(axis) is Sums.ALL:
            yield Fault(
                None,
                where,
                f"has gradients that are parts along {axis!r}, which is no axis that splits a sample",
                "Name axes of the job; the sum over dp is taken of every gradient",
            )
        elif axis in spread and not any(s.axis == axis and s.copies > 1 for s in parameter.shards):
            yield Fault(
                None,
                where,
                f"is spread over {axis}, so gradients along it belong to different rows",
                f"Take {axis} out of `partial`, or out of `shards`",
            )
    for shard in parameter.shards:
        yield from _copies(where, parameter, shard, axes.get(shard.axis, 1))
    if len(set(parameter.partial)) < len(parameter.partial):
        yield Fault(None, where, f"names an axis of `partial` twice: {list(parameter.partial)}", "Keep one")


def _copies(where: str, parameter: Parameter, shard: Shard, size: int) -> Iterator[Fault]:
    """Ranks that hold the same part are as many for each part, and add up their gradients."""
    if shard.copies < 1 or size % shard.copies:
        yield Fault(
            None,
            where,
            f"has parts that {shard.copies} ranks of {shard.axis} hold each, but it has {size} ranks",
            f"Name a number that divides {size}",
        )
    elif shard.copies > 1 and parameter.grads and shard.axis not in parameter.partial:
        yield Fault(
            None,
            where,
            f"has parts that {shard.copies} ranks of {shard.axis} hold each, whose gradients are not summed",
            f"Name {shard.axis} in `partial`",
        )


def _tie(first: Parameter, parameter: Parameter) -> Iterator[Fault]:
    """Copies of one tensor are summed element by element."""

    def whole(of: Parameter) -> tuple[object, ...]:
        return of.spec, of.own_dtype, of.shards

    if whole(first) != whole(parameter):
        yield Fault(
            None,
            f"parameter {parameter.name}",
            f"is one tensor with {first.name}, but is spread or shaped differently "
            f"({parameter.spec}, {_spread(parameter)}; {first.spec}, {_spread(first)})",
            "Spread tied parameters alike",
        )
    if first.grads and parameter.grads and set(first.partial) != set(parameter.partial):
        yield Fault(
            None,
            f"parameter {parameter.name}",
            f"is one tensor with {first.name}, but their gradients are parts along different axes "
            f"({list(parameter.partial)}; {list(first.partial)})",
            "Give both one style",
        )


def _spread(parameter: Parameter) -> str:
    return " and ".join(f"{s.axis} along dim {s.dim}" for s in parameter.shards) or "not spread"


def _differences(plan: Plan, differing: set[str]) -> Iterator[Fault]:
    job = plan.job
    size = job.size(TENSOR)
    ranks = f"{TENSOR} ranks, which all hold it whole"
    if job.loss[1] in differing:
        yield Fault(
            plan.rank_of(job.loss[0]),
            "loss",
            f"{job.loss[1]} differs between {TENSOR} ranks",
            "Gather or sum what it is made of first",
        )
    for parameter in job.parameters:
        if any(shard.axis == TENSOR for shard in parameter.shards):
            continue
        for stage, phase, value in parameter.grads:
            differs, partial = value in differing, TENSOR in parameter.partial
            if differs == partial:
                continue
            yield Fault(
                plan.rank_of(stage),
                f"parameter {parameter.name}",
                f"its gradient {value} ({stage}{phase}) differs between {ranks}, and is not summed"
                if differs
                else f"its gradient {value} ({stage}{phase}) is the whole on every {TENSOR} rank, "
                f"and would be counted {size} times",
                f"Name {TENSOR} in `partial`" if differs else f"Take {TENSOR} out of `partial`",
            )
    for buffer in job.buffers:
        for stage, phase, value in buffer.updates:
            if value in differing:
                yield Fault(
                    plan.rank_of(stage),
                    f"buffer {buffer.name}",
                    f"its update {value} ({stage}{phase}) differs between {ranks}",
                    "Sum or gather what it is made of first",
                )
