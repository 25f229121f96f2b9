"""What ops read of parameters is made once a step (UNSHARD): of rows that ranks keep, the full parameter is
gathered; of one in another dtype, a copy is made (Rajbhandari et al., "ZeRO", 2020).

In the order in which the rank's stages read them. Copies in the dtype of the computation are made first, so
that half as much travels in bfloat16. Large parameters are gathered by themselves; small ones that follow
each other share a bucket. Over several axes one gather follows the other, that over the last axis first: each
rank then has rows of its neighbours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from stretto.ir.action import Phase
from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import ALL_GATHER
from stretto.ir.kept import shard_spec
from stretto.ir.program import PARAM, SHARD, WAIT, Const, Job, Op, Parameter, Ref, TensorSpec
from stretto.schedule.flat import in_buckets, side_by_side, taken_apart, viewed

CAST, SLICE = "aten._to_copy.default", "aten.slice.Tensor"


def gathers_of(job: Job, stages: Sequence[int], pp_rank: int) -> Iterator[Op]:
    """The program of a pipeline rank that has these stages."""
    groups = [group for group in _needed(job, stages) if group[0].is_made]
    for group in groups:
        if not group[0].kept:
            for parameter in group:
                yield _cast(f"{PIPELINE}.made.{parameter.name}", parameter, writes=PARAM + parameter.name)
    numbers: Counter[str] = Counter()
    alike = groupby(
        (group for group in groups if group[0].kept), lambda group: (group[0].kept, group[0].spec.dtype)
    )
    for (kept, _), following in alike:
        for bucket in in_buckets(list(following), lambda group: group[0].spec.nbytes):
            axis = kept[-1]
            yield from _gathered(job, f"{axis}.unshard.{pp_rank}.{numbers[axis]}", bucket)
            numbers[axis] += 1


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


def _gathered(job: Job, name: str, bucket: Sequence[Sequence[Parameter]]) -> Iterator[Op]:
    """The gathers of these tied groups, from all axes over which they are kept."""
    kept = bucket[0][0].kept
    sources: list[str] = []
    specs = [replace(shard_spec(job, group[0]), dtype=group[0].spec.dtype) for group in bucket]
    for at, (group, spec) in enumerate(zip(bucket, specs, strict=True)):
        sources.append(SHARD + group[0].tied_to)
        if group[0].own_dtype is not None:
            sources[-1] = f"{name}.{at}.cast"
            yield _cast(sources[-1], group[0], spec)
    source, made = sources[0], specs[0]
    if len(bucket) > 1:
        made = TensorSpec((1, sum(spec.numel for spec in specs)), specs[0].dtype)
        source = f"{name}.flat"
        yield side_by_side(source, sources, 1, made)
    starts = [(axis, f"{name}.{axis}" if axis != kept[-1] else name) for axis in reversed(kept)]
    for axis, start in starts:
        size = job.size(axis)
        made = replace(made, shape=(made.shape[0] * size, *made.shape[1:]))
        yield Op(start, ALL_GATHER.target, (Ref(source), axis, size), (), (made,))
        source = f"{start}.all"
        yield Op(source, WAIT, (Ref(start),), (), (made,), start)
    alias = starts[-1][1]
    parts = math.prod(job.size(axis) for axis in kept)
    sizes = [spec.numel for spec in specs]
    if len(bucket) > 1:
        yield from taken_apart(name, source, made, sizes, None)
    for at, (group, spec) in enumerate(zip(bucket, specs, strict=True)):
        rows = replace(spec, shape=(spec.shape[0] * parts, *spec.shape[1:]))
        given = source
        if len(bucket) > 1:
            given = f"{name}.{at}.rows"
            alias = f"{name}.{at}"
            yield viewed(given, alias, rows, alias)
        for k, parameter in enumerate(group):
            yield from _as_read(f"{name}.{at}.{k}", given, rows, parameter, alias)


def _as_read(name: str, rows: str, spec: TensorSpec, parameter: Parameter, alias: str) -> Iterator[Op]:
    """The parameter, of rows of which the last ones may be padding."""
    writes, wanted = PARAM + parameter.name, parameter.spec
    if not wanted.shape:
        one = replace(spec, shape=(1,))
        yield Op(f"{name}.one", SLICE, (Ref(rows), 0, 0, 1), (), (one,), alias)
        yield viewed(name, f"{name}.one", wanted, alias, writes)
    elif wanted.shape == spec.shape:
        yield viewed(name, rows, wanted, alias, writes)
    else:
        yield Op(name, SLICE, (Ref(rows), 0, 0, wanted.shape[0]), (), (wanted,), alias, writes=writes)
