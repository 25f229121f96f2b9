"""Parameters that one of the ranks with copies keeps in full, for optimizers that look at full matrices
(Muon, Shampoo, Adafactor): which rank keeps which, and how they travel.

Ranks of one program have tensors of equal shapes, so what travels are buckets, of which each rank keeps a row
of equally many elements: in it its own parameters lie one behind another, then padding.

    1. Parameters that are placed alike are taken in the model's order. A bucket is closed when each rank's
       row is large enough to travel by itself, and rows are full to a few percent; equal blocks fill rows
       exactly when there are as many of them as ranks, or a share of that.
    2. In a bucket the largest parameter goes to the rank that has least, and so on (longest processing time
       first, Graham 1969).
    3. A bucket's row is gathered as rows of a parameter are; parameters are views of what was gathered.
    4. Gradients of a bucket are put one behind another as its parameters lie, with zeros as padding; of their
       sums each rank gets its row.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from stretto.errors import UsageError
from stretto.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from stretto.ir.kept import bucket_pieces, part_count, rows_shape, shard_spec
from stretto.ir.parameters import DTYPE_BYTES, BucketSlot
from stretto.ir.program import FREE, GRAD, PARAM, SHARD, WAIT, Const, Job, Op, Parameter, Ref, TensorSpec
from stretto.passes.flat import Moved, is_large, side_by_side, taken_apart, viewed, with_rows
from stretto.passes.rows import OF, in_dtype

ALIGNED = 16
"""Elements of which a parameter's place in a row is a multiple: 32 bytes in bfloat16, as kernels for products
of matrices want. Assumed: other accelerators want no more."""

UNEVEN = 0.05
"""The share of padding with which a bucket is closed. Assumed: what more buckets hide is worth so much of
memory."""

GROWS = 1.05
"""How much a bucket has to grow before its padding is counted again, so that thousands of parameters are
counted some hundred times. Assumed: rows of a bucket that is larger by less are hardly fuller."""

Tie = list[Parameter]
"""Parameters that are one tensor."""


# Steps 1 and 2.


def with_owners(job: Job, patterns: Sequence[str]) -> Job:
    """The job in which one rank keeps each parameter, kept in parts, whose name fits one of the patterns.

    Raises UsageError for a pattern that fits none."""
    ties: dict[str, Tie] = defaultdict(list)
    for parameter in job.parameters:
        ties[parameter.tied_to].append(parameter)
    for pattern in patterns:
        if not any(fnmatchcase(parameter.name, pattern) for parameter in job.parameters):
            names = ", ".join(repr(parameter.name) for parameter in job.parameters[:3])
            raise UsageError(
                f"owners names {pattern!r}, and the model has no parameter of such a name (it has {names}, "
                "...): give a pattern of full names, in which * is any text, or drop it"
            )
    alike: dict[object, list[Tie]] = defaultdict(list)
    for tie in ties.values():
        named = any(fnmatchcase(p.name, pattern) for p in tie for pattern in patterns)
        if named and tie[0].kept and tie[0].spec.numel:
            alike[_likeness(tie)].append(tie)
    slots: dict[str, BucketSlot] = {}
    for several in alike.values():
        parts = part_count(job, several[0][0])
        for bucket in _buckets(several, parts):
            places, length = _dealt([_numel(tie) for tie in bucket], parts)
            first = min(places, key=lambda place: place[1:])[0]
            name = bucket[first][0].tied_to
            for at, part, begin in places:
                slots[bucket[at][0].tied_to] = BucketSlot(name, part, begin, length)
    return replace(job, parameters=tuple(replace(p, slot=slots.get(p.tied_to)) for p in job.parameters))


def _likeness(tie: Tie) -> object:
    """What is equal of parameters that may lie in one bucket: where they are used, what is done to them."""
    first = tie[0]
    return (
        tuple(sorted({stage for p in tie for stage in p.stages})),
        tuple(sorted({axis for p in tie for axis in p.partial})),
        tuple((shard.axis, shard.copies) for shard in first.shards),
        any(p.grads for p in tie),
        (first.kept, first.spec.dtype, first.own_dtype),
    )


def _numel(tie: Tie) -> int:
    return -(-tie[0].spec.numel // ALIGNED) * ALIGNED


def _buckets(ties: Sequence[Tie], parts: int) -> Iterator[Sequence[Tie]]:
    """Step 1."""
    made: list[list[Tie]] = [[]]
    total = counted = 0
    for tie in ties:
        made[-1].append(tie)
        total += _numel(tie)
        row_bytes = total // parts * DTYPE_BYTES[tie[0].spec.dtype]
        if is_large(row_bytes) and total > counted * GROWS:
            counted = total
            if parts * _length(made[-1], parts) <= (1 + UNEVEN) * total:
                made.append([])
                total = counted = 0
    *full, rest = made
    if full and rest and _length(full[-1] + rest, parts) < _length(full[-1], parts) + _length(rest, parts):
        full[-1] += rest
        rest = []
    yield from full
    if rest:
        yield rest


def _length(ties: Sequence[Tie], parts: int) -> int:
    return _dealt([_numel(tie) for tie in ties], parts)[1]


def _dealt(sizes: Sequence[int], parts: int) -> tuple[list[tuple[int, int, int]], int]:
    """Step 2: (number of the parameter, part, first element) of each, and the elements of a part."""
    loads = [(0, part) for part in range(parts)]
    places = []
    for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        load, part = heapq.heappop(loads)
        places.append((at, part, load))
        heapq.heappush(loads, (load + sizes[at], part))
    return places, max(max(loads)[0], ALIGNED)


# Steps 3 and 4.


def gathered_bucket(job: Job, name: str, bucket: Sequence[Sequence[Parameter]], *, writes: bool) -> Moved:
    """Step 3: as `stretto.passes.rows.gathered`, of tied groups that lie in one bucket."""
    first = bucket[0][0]
    spec = first.spec
    made = replace(shard_spec(job, first), dtype=spec.dtype)
    ops: list[Op] = []
    source = SHARD + first.kept_as
    if first.own_dtype is not None:
        ops = in_dtype(f"{name}.cast", [source], [made], [()])
        source = ops[-1].name
    start = name
    for axis in reversed(first.kept):
        size = job.size(axis)
        made = replace(made, shape=(made.shape[0] * size, made.shape[1]))
        start = name if axis == first.kept[-1] else f"{axis}.{name}"
        ops.append(Op(start, ALL_GATHER.target, (Ref(source), axis, size), (), (made,)))
        source = f"{start}.all"
        ops.append(Op(source, WAIT, (Ref(start),), (), (made,), start))
    row = replace(made, shape=(1, made.numel))
    ops.append(viewed(f"{name}.row", source, row, start))
    pieces = bucket_pieces(job, first.kept_as)
    ops += taken_apart(name, f"{name}.row", row, [numel for _, numel in pieces], start)
    places = {p.tied_to: at for at, (p, _) in enumerate(pieces) if p is not None}
    values = []
    for parameter in (parameter for group in bucket for parameter in group):
        values.append(f"{name}{OF}{parameter.name}")
        into = (PARAM + parameter.name,) if writes else ()
        at = places[parameter.tied_to]
        ops.append(viewed(values[-1], f"{name}.{at}", parameter.spec, start, into))
    return Moved([], ops, values)


def scattered_bucket(
    job: Job, name: str, axis: str, bucket: str, grads: dict[str, tuple[str, TensorSpec]]
) -> Moved:
    """Step 4, over the first of the axes over which the bucket is kept. grads: first name of a tie -> the
    parameter that has its gradient, and what it is; they go, but that of the first of the bucket becomes the
    sum."""
    pieces = bucket_pieces(job, bucket)
    dtype = next(iter(grads.values()))[1].dtype
    lead: list[Op] = []
    sources: list[str] = []
    padding: dict[int, str] = {}
    for at, (parameter, numel) in enumerate(pieces):
        if parameter is None:
            if numel not in padding:
                padding[numel] = f"{name}.zeros.{numel}"
                how = (
                    ("dtype", Const("dtype", dtype)),
                    ("device", Const("device", "job")),
                    ("pin_memory", False),
                )
                shape = (1, numel)
                lead.append(
                    Op(padding[numel], "aten.zeros.default", (shape,), how, (TensorSpec(shape, dtype),))
                )
            sources.append(padding[numel])
            continue
        of, spec = grads[parameter.tied_to]
        rows = with_rows(f"{name}.{at}", GRAD + of, spec, rows_shape(job, parameter))
        lead += rows
        sources.append(rows[-1].name if rows else GRAD + of)
    size = job.size(axis)
    first = next(parameter for parameter, _ in pieces if parameter is not None)
    parts = part_count(job, first)
    row = TensorSpec((1, sum(numel for _, numel in pieces)), dtype)
    flat, made = (TensorSpec((count, row.numel // parts), dtype) for count in (parts, parts // size))
    lead.append(side_by_side(f"{name}.flat", sources, 1, row))
    others = tuple(GRAD + of for tie, (of, _) in grads.items() if tie != bucket)
    if others:
        lead.append(Op(f"{name}.gone", FREE, (), writes=others))
    lead.append(viewed(f"{name}.rows", f"{name}.flat", flat, f"{name}.flat"))
    lead.append(Op(name, REDUCE_SCATTER.target, (Ref(f"{name}.rows"), "sum", axis, size), (), (made,)))
    into = (GRAD + grads[first.kept_as][0],)
    return Moved(lead, [Op(f"{name}.sum", WAIT, (Ref(name),), (), (made,), name, writes=into)], specs=[made])
