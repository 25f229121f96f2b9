"""What ops read of parameters is made once a step (UNSHARD): of rows that ranks keep, the full parameter is
gathered; of one in another dtype, a copy is made (Rajbhandari et al., "ZeRO", 2020).

In the order in which the rank's stages read them. Copies in the dtype of the computation are made first, so
that half as much travels in bfloat16. Large parameters are gathered by themselves; small ones that follow
each other share a bucket. Over several axes one gather follows the other, that over the last axis first: each
rank then has rows of its neighbours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_GATHER
from stretto.ir.kept import part_count, shard_spec
from stretto.ir.program import PARAM, SHARD, WAIT, Const, Job, Op, Parameter, Ref, TensorSpec
from stretto.schedule.flat import Moved, bucketed, side_by_side, taken_apart, viewed

CAST, SLICE = "aten._to_copy.default", "aten.slice.Tensor"


def gathers_of(job: Job, stages: Sequence[int], pp_rank: int) -> Iterator[Op]:
    """The program of a pipeline rank that has these stages."""
    groups = [group for group in _needed(job, stages) if group[0].is_made]
    for group in groups:
        if not group[0].kept:
            for parameter in group:
                yield _cast(f"{PIPELINE}.made.{parameter.name}", parameter, writes=PARAM + parameter.name)
    numbers: Counter[str] = Counter()
    for bucket in buckets_of([group for group in groups if group[0].kept]):
        axis = bucket[0][0].kept[-1]
        yield from gathered(job, f"{axis}.unshard.{pp_rank}.{numbers[axis]}", bucket, writes=True).tail
        numbers[axis] += 1


def buckets_of(groups: Sequence[Sequence[Parameter]]) -> list[Sequence[Sequence[Parameter]]]:
    """Tied groups that are gathered, or scattered, together."""
    return bucketed(
        groups,
        nbytes=lambda group: group[0].spec.nbytes,
        like=lambda group: (group[0].kept, group[0].spec.dtype, group[0].grad_dtype),
    )


def _needed(job: Job, stages: Sequence[int]) -> list[list[Parameter]]:
    """Tied groups that these stages read, in that order."""
    groups: dict[str, list[Parameter]] = {}
    known = {PARAM + parameter.name: parameter for parameter in job.parameters}
    read = dict.fromkeys(
        name
        for phase in (Phase.F, Phase.I, Phase.W)
        for stage in sorted(stages, reverse=phase is not Phase.F)
        for op in job.stages[stage].ops[phase]
        for name in op.uses
        if name in known
    )
    for name in read:
        groups.setdefault(known[name].tied_to, []).append(known[name])
    return list(groups.values())


def _cast(name: str, parameter: Parameter, spec: TensorSpec | None = None, writes: str | None = None) -> Op:
    """What is kept, in the dtype that ops read."""
    dtype = (("dtype", Const("dtype", parameter.spec.dtype)),)
    made = parameter.spec if spec is None else spec
    return Op(name, CAST, (Ref(SHARD + parameter.tied_to),), dtype, (made,), writes=writes)


def gathered(job: Job, name: str, bucket: Sequence[Sequence[Parameter]], *, writes: bool) -> Moved:
    """The gathers of these tied groups, from all axes over which they are kept, all of it in `tail`; values:
    by group, and in it by parameter. writes: whether they become what ops of the step read."""
    kept = bucket[0][0].kept
    ops: list[Op] = []
    sources: list[str] = []
    specs = [replace(shard_spec(job, group[0]), dtype=group[0].spec.dtype) for group in bucket]
    for at, (group, spec) in enumerate(zip(bucket, specs, strict=True)):
        sources.append(SHARD + group[0].tied_to)
        if group[0].own_dtype is not None:
            sources[-1] = f"{name}.{at}.cast"
            ops.append(_cast(sources[-1], group[0], spec))
    parts = part_count(job, bucket[0][0])
    source, made = sources[0], specs[0]
    direct = len(bucket) == 1 and (made.shape[0] * parts, *made.shape[1:]) == bucket[0][0].spec.shape
    if not direct:
        made = TensorSpec((1, sum(spec.numel for spec in specs)), specs[0].dtype)
        source = f"{name}.flat"
        ops.append(side_by_side(source, sources, 1, made))
    start = name
    for axis in reversed(kept):
        size = job.size(axis)
        made = replace(made, shape=(made.shape[0] * size, *made.shape[1:]))
        start = name if axis == kept[-1] else f"{axis}.{name}"
        ops.append(Op(start, ALL_GATHER.target, (Ref(source), axis, size), (), (made,)))
        source = f"{start}.all"
        ops.append(Op(source, WAIT, (Ref(start),), (), (made,), start))
    if len(bucket) > 1:
        ops += taken_apart(name, source, made, [spec.numel for spec in specs], None)
    values: list[str] = []
    for at, (group, spec) in enumerate(zip(bucket, specs, strict=True)):
        given, alias = (source, start) if len(bucket) == 1 else (f"{name}.{at}", f"{name}.{at}")
        numel = spec.numel * parts
        if numel > group[0].spec.numel:  # the last rows are padding
            row, rest = TensorSpec((1, numel), spec.dtype), TensorSpec((1, group[0].spec.numel), spec.dtype)
            ops.append(viewed(f"{given}.row", given, row, alias))
            cut = (Ref(f"{given}.row"), 1, 0, rest.numel)
            ops.append(Op(f"{given}.cut", SLICE, cut, (), (rest,), alias))
            given = f"{given}.cut"
        for k, parameter in enumerate(group):
            values.append(f"{name}.{at}.{k}")
            into = PARAM + parameter.name if writes else None
            ops.append(viewed(values[-1], given, parameter.spec, alias, into))
    return Moved([], ops, values)
