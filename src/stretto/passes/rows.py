"""Full parameters of the rows that ranks keep of them: gathered over one axis after the other, that over the
last first, so that each rank has rows of its neighbours; in the dtype of the computation, in which they
travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.collectives import ALL_GATHER
from stretto.ir.kept import part_count, shard_spec
from stretto.ir.placements import IN_DTYPE
from stretto.ir.program import GETITEM, PARAM, SHARD, WAIT, Const, Job, Op, Parameter, Ref, TensorSpec
from stretto.passes.flat import Moved, bucketed, side_by_side, taken_apart, viewed

CAST, SLICE = "aten._to_copy.default", "aten.slice.Tensor"
OF = ":"
"""In the name of what was gathered, before that of the parameter."""


def buckets_of(groups: Sequence[Sequence[Parameter]]) -> list[Sequence[Sequence[Parameter]]]:
    """Tied groups that are gathered, or scattered, together, by the first of each."""
    rows = [group for group in groups if group[0].slot is None]
    result = bucketed(
        rows,
        nbytes=lambda group: group[0].spec.nbytes,
        like=lambda group: (group[0].kept, group[0].spec.dtype, group[0].grad_dtype),
    )
    owned: dict[str, list[Sequence[Parameter]]] = {}
    for group in groups if len(rows) < len(groups) else ():
        if group[0].slot is not None:
            owned.setdefault(group[0].kept_as, []).append(group)
    places = {id(group): at for at, group in enumerate(groups)}
    return sorted([*result, *owned.values()], key=lambda bucket: places[id(bucket[0])])


def read_of(value: str) -> str | None:
    """The name under which the model reads the parameter that a value is, gathered or not; else None."""
    if value.startswith(PARAM):
        return value
    _, gathered_of, name = value.partition(OF)
    return PARAM + name if gathered_of else None


def in_dtype(
    name: str, sources: Sequence[str], specs: Sequence[TensorSpec], writes: Sequence[tuple[str, ...]]
) -> list[Op]:
    """Copies of these with the dtype of the specs; values are what the last so many ops make."""
    dtype = (("dtype", Const("dtype", specs[0].dtype)),)
    if len(sources) == 1:
        return [Op(name, CAST, (Ref(sources[0]),), dtype, (specs[0],), writes=writes[0])]
    return [
        Op(name, IN_DTYPE, (tuple(map(Ref, sources)),), dtype, tuple(specs)),
        *(
            Op(f"{name}.{at}", GETITEM, (Ref(name), at), (), (spec,), writes=into)
            for at, (spec, into) in enumerate(zip(specs, writes, strict=True))
        ),
    ]


def gathered(job: Job, name: str, bucket: Sequence[Sequence[Parameter]], *, writes: bool) -> Moved:
    """The gathers of these tied groups, from all axes over which they are kept, all of it in `tail`; values:
    by group, and in it by parameter. writes: whether they become what ops of the step read."""
    kept = bucket[0][0].kept
    ops: list[Op] = []
    sources = [SHARD + group[0].tied_to for group in bucket]
    specs = [replace(shard_spec(job, group[0]), dtype=group[0].spec.dtype) for group in bucket]
    if bucket[0][0].own_dtype is not None:
        ops = in_dtype(f"{name}.cast", sources, specs, [()] * len(bucket))
        sources = [op.name for op in ops[-len(bucket) :]]
    parts = part_count(job, bucket[0][0])
    source, made = sources[0], specs[0]
    direct = len(bucket) == 1 and made.numel * parts == bucket[0][0].spec.numel
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
        for parameter in group:
            values.append(f"{name}{OF}{parameter.name}")
            into = (PARAM + parameter.name,) if writes else ()
            ops.append(viewed(values[-1], given, parameter.spec, alias, into))
    return Moved([], ops, values)
