"""Proves that axes and shards fit together, and that every op can be computed on what tensor-parallel ranks
keep of its operands.

Parameters that are sharded name real axes and dims; copies of one tensor are sharded alike.

Passes and planning have made the programs, and a plan file may be anybody's. So each op is placed again
(`stretto.ir.placements`) from the parameters' shards on, through all stages: a partial sum that is
used as if it were the sum, a sum over ranks of what is full on each, a slice beside a full value, and
gradients that are other than their parameters say. The order of gathered rows is not followed here, and what
an op without a rule makes is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stretto.ir.axes import AXES, TENSOR, WITHIN, Sums, sums_of
from stretto.ir.flow import PHASES, given_specs
from stretto.ir.op_names import COPIES, names
from stretto.ir.placed_programs import place_all, placers_of, programs_of, shards_of
from stretto.ir.placement import is_thin
from stretto.ir.placements import Placer
from stretto.ir.plan import Plan
from stretto.ir.program import GETITEM, VIEWS, Job, Op, Parameter, TensorSpec
from stretto.verifying.buckets import slot_faults
from stretto.verifying.fault import Fault


def sharding_faults(plan: Plan) -> list[Fault]:
    """Every fault of axes, shards and ties. References must be sound."""
    result = list(_axes(plan.job))
    first: dict[str, Parameter] = {}
    for parameter in plan.job.parameters:
        wrong = (*_shards(plan.job, parameter), *_partial(plan.job, parameter), *_parts(plan.job, parameter))
        result += (Fault(None, f"parameter {parameter.name}", what, fix) for what, fix in wrong)
        result += _tie(first.setdefault(parameter.tied_to, parameter), parameter)
    return result or [*slot_faults(plan.job)]


def _axes(job: Job) -> Iterator[Fault]:
    names = [axis for axis, _ in job.axes]
    if names != [axis for axis in AXES[1:] if axis in names]:
        known = ", ".join(AXES[1:])
        yield Fault(None, "axes", f"are {', '.join(names)}", f"Name each once, of {known} and in that order")
    for axis, size in job.axes:
        if size < 1:
            yield Fault(None, f"axis {axis}", f"has {size} ranks", "An axis has at least one")


def _shards(job: Job, parameter: Parameter) -> Iterator[tuple[str, str]]:
    axes, shape = dict(job.axes), parameter.spec.shape
    for shard in parameter.shards:
        if shard.axis not in axes:
            what = f"is sharded over {shard.axis!r}, which is no axis of the job"
            yield what, f"The job has {', '.join(axes) or 'none'} other than pp"
        if not 0 <= shard.dim < len(shape):
            yield f"is sharded along dim {shard.dim}, but is {parameter.spec}", "Name a dim it has"
        elif shard.blocks < 1 or shape[shard.dim] % shard.blocks:
            rows = f"{shape[shard.dim]} rows along dim {shard.dim}"
            what = f"has {rows}, not {shard.blocks} equal blocks of them"
            yield what, "Name as many blocks as the parameter has"
        # Ranks that have the same part are as many for each part, and add up their gradients.
        kept = f"has parts that {shard.copies} ranks of {shard.axis} keep each"
        size = axes.get(shard.axis, 1)
        if shard.copies < 1 or size % shard.copies:
            yield f"{kept}, but it has {size} ranks", f"Name a number that divides {size}"
        elif shard.copies > 1 and parameter.grads and shard.axis not in parameter.partial:
            yield f"{kept}, whose gradients are not summed", f"Name {shard.axis} in `partial`"
    sharded = [shard.axis for shard in parameter.shards]
    for axis in sorted({axis for axis in sharded if sharded.count(axis) > 1}):
        yield f"is sharded over {axis} twice", "Keep one shard an axis"


def _partial(job: Job, parameter: Parameter) -> Iterator[tuple[str, str]]:
    shards = {shard.axis: shard for shard in parameter.shards}
    for axis in parameter.partial:
        if axis not in dict(job.axes) or sums_of(axis) is Sums.ALL:
            what = f"has gradients that are parts along {axis!r}, which is no axis that splits a sample"
            yield (
                what,
                "Name axes of the job; over others every gradient is summed that is not sharded over them",
            )
        elif axis in shards and shards[axis].copies == 1:
            what = f"is sharded over {axis}, so gradients along it belong to different rows"
            yield what, f"Take {axis} out of `partial`, or out of `shards`"
    if len(set(parameter.partial)) < len(parameter.partial):
        yield f"names an axis of `partial` twice: {list(parameter.partial)}", "Keep one"


def _parts(job: Job, parameter: Parameter) -> Iterator[tuple[str, str]]:
    """Rows are dealt out among ranks that all have them, of this stage."""
    copies = [axis for axis, _ in job.axes if axis != TENSOR and not parameter.is_sharded(axis)]
    for axis in sorted({a for a in parameter.kept if a not in copies or parameter.kept.count(a) > 1}):
        what = f"is kept in parts over {axis!r}, along which ranks have no copies of it, or twice"
        yield what, f"Name each once, of {', '.join(copies) or 'none'}"
    if parameter.kept and job.zero == 0:
        yield f"is kept in parts over {', '.join(parameter.kept)}, and `zero` is 0", "Name none"


def _tie(first: Parameter, parameter: Parameter) -> Iterator[Fault]:
    """Copies of one tensor are summed element by element."""
    both = bool(first.grads and parameter.grads)
    one, other = (
        (p.spec, p.own_dtype, p.shards, p.kept, p.slot, sorted(p.partial) if both else [])
        for p in (parameter, first)
    )
    if one != other:
        what = f"is one tensor with {first.name}, but is shaped, sharded or summed otherwise ({one}; {other})"
        yield Fault(None, f"parameter {parameter.name}", what, "Place tied parameters alike")


HIGHEST = names("amax amin max min max.dim min.dim")
NORMS = names("linalg_vector_norm norm.ScalarOpt_dim norm.Scalar")
"""Of which that of order infinity is a highest element."""


def placement_faults(plan: Plan) -> list[Fault]:
    """Every fault of what ranks have that share samples. The programs must have no other fault."""
    sizes = ((axis, plan.job.size(axis)) for axis in WITHIN)
    return [fault for axis, size in sizes if size > 1 for fault in _faults_along(plan, axis, size)]


def _faults_along(plan: Plan, axis: str, size: int) -> list[Fault]:
    job = plan.job
    placers = placers_of(axis, size, shards_of(job, axis))
    specs = given_specs(job)
    stages, programs = zip(*programs_of(job), strict=True)
    troubles = place_all(programs, placers, specs)
    result = [
        Fault(plan.rank_of(stages[at]), f"{op.name} ({op.target})", f"{trouble} (along {axis})", trouble.fix)
        for at, op, trouble in troubles
    ]
    result += _reductions(plan, axis)
    return result or [*_kept(plan, axis, placers), *_gradients(plan, axis, placers, specs)]


def _reductions(plan: Plan, axis: str) -> Iterator[Fault]:
    """Partial sums are summed, and of the ranks' highest elements the highest is taken."""
    made = {op.name: op for stage in plan.job.stages for ops in stage.ops.values() for op in ops}
    for stage, op in ((s, op) for s in plan.job.stages for phase in PHASES for op in s.ops[phase]):
        if op.kind is None or not op.kind.reductions or op.lane != axis:
            continue
        source = op.args[0].name
        maker = _maker(made, source)
        if op.how == "max" and maker not in (*HIGHEST, *NORMS):
            what = f"takes the maximum of {source} over {axis} ranks, which is no highest element"
            yield Fault(plan.rank_of(stage.index), f"{op.name} ({op.target})", what, "Reduce it by sum")
        elif op.how != "max" and maker in HIGHEST:
            what = f"adds up {source} over {axis} ranks, which is each rank's highest element"
            yield Fault(plan.rank_of(stage.index), f"{op.name} ({op.target})", what, "Reduce it by max")


def _maker(made: Mapping[str, Op], name: str) -> str:
    """The function that makes a value, behind views, copies and changes of sign; "" if no op does."""
    op = made.get(name)
    while op is not None and (op.target in COPIES or op.target in VIEWS or op.target == GETITEM):
        op = made.get(op.uses[0]) if op.uses else None
    return "" if op is None else op.target


def _gradients(plan: Plan, axis: str, placers: list[Placer], specs: dict[str, TensorSpec]) -> Iterator[Fault]:
    """Gradients of sharded parameters are sharded with them, others are full or partial sums, as they say."""
    for parameter in plan.job.parameters:
        where, partial = f"parameter {parameter.name}", axis in parameter.partial
        for stage, phase, value in parameter.grads:
            rank, its = plan.rank_of(stage), f"its gradient {value} ({stage}{phase})"
            if value not in specs:
                what = f"{its} needs what a later program makes of it"
                yield Fault(rank, where, what, "Put each op behind what it reads, I before W")
                continue
            for placer in placers:
                own, kept = placer.of(f"param/{parameter.name}"), placer.of(value)
                thin = is_thin(kept, specs[value].shape)  # one element may be a partial sum as well
                if kept.zero:
                    continue
                if own.kind == "part" or (parameter.scattered and axis in parameter.kept):
                    right = kept.kind in ("part", "local")
                elif partial:
                    right = not kept.is_full and (kept.kind != "part" or thin)
                else:
                    right = kept.is_full or thin
                if not right:
                    summed = "summed" if partial else "not summed"
                    what = f"{its} is {kept} on {axis} ranks, but the parameter is {own}, and it is {summed}"
                    yield Fault(rank, where, what, "Give the parameter the shard or `partial` that fits")


def _kept(plan: Plan, axis: str, placers: list[Placer]) -> Iterator[Fault]:
    """The loss, and what buffers become, are full on every rank."""
    for placer in placers:
        stage, loss = plan.job.loss
        if not placer.of(loss).is_full:
            what = f"{loss} differs between {axis} ranks"
            yield Fault(plan.rank_of(stage), "loss", what, "Gather or sum what it is made of first")
        for buffer in plan.job.buffers:
            for stage, phase, value in buffer.updates:
                if not placer.of(value).is_full:
                    what = f"its update {value} ({stage}{phase}) differs between {axis} ranks, which all "
                    fix = "Sum or gather what it is made of first"
                    yield Fault(plan.rank_of(stage), f"buffer {buffer.name}", f"{what}keep it full", fix)
