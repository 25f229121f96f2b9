"""Tensors side by side in a flat one, so that one collective serves all of them, and apart again.

Rows of a flat tensor are parts: what goes to each rank, or comes from it. Each tensor is cut along dim 0 into
as many parts, padded with zeros to equal ones, and has some columns, as FSDP2 lays out its buckets (PyTorch
#121081, `_chunk_cat`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stretto.ir.collectives import REDUCE_SCATTER
from stretto.ir.program import GETITEM, VIEW, WAIT, Const, Op, Ref, TensorSpec

LARGE_BYTES = 4 * 2**20
"""What has at least so many bytes travels by itself. Assumed: its transfer takes far longer than a
collective's latency on any link, and a copy into a bucket would cost memory and time. A bucket that has grown
to it is closed, for the same reason: more would only start later."""

ADD, CAT = "aten.add.Tensor", "aten._chunk_cat.default"
CLONE, CONTIGUOUS = "aten.clone.default", (("memory_format", Const("memory_format", "contiguous_format")),)
VIEWS, COPIES = "aten.split_with_sizes.default", "aten.split_with_sizes_copy.default"

T = TypeVar("T")


def is_large(nbytes: int) -> bool:
    """Whether so much travels by itself."""
    return nbytes >= LARGE_BYTES


def bucketed(
    items: Sequence[T], nbytes: Callable[[T], int], like: Callable[[T], object]
) -> list[Sequence[T]]:
    """Large ones by themselves, and small ones that are alike together, by the first of each."""
    small: dict[object, list[T]] = {}
    result: list[Sequence[T]] = []
    for item in items:
        if is_large(nbytes(item)):
            result.append([item])
        else:
            small.setdefault(like(item), []).append(item)
    for alike in small.values():
        result += in_buckets(alike, nbytes)
    places = {id(item): at for at, item in enumerate(items)}
    return sorted(result, key=lambda bucket: places[id(bucket[0])])


def in_buckets(items: Sequence[T], nbytes: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Those that travel together, in their order."""
    first = total = 0
    for at, item in enumerate(items, 1):
        total += nbytes(item)
        if is_large(total) or at == len(items):
            yield items[first:at]
            first, total = at, 0


def viewed(name: str, source: str, spec: TensorSpec, alias: str, writes: tuple[str, ...] = ()) -> Op:
    """The source in another shape."""
    return Op(name, VIEW, (Ref(source), spec.shape), (), (spec,), alias, writes=writes)


def with_rows(name: str, source: str, spec: TensorSpec, shape: Sequence[int]) -> list[Op]:
    """What gives the source this shape, with the rows that are cut; nothing where it has it."""
    if spec.shape == tuple(shape):
        return []
    result: list[Op] = []
    dense = replace(spec, stride=None)
    if spec.stride is not None:
        result.append(Op(f"{name}.dense", CLONE, (Ref(source),), CONTIGUOUS, (dense,)))
        source = result[-1].name
    return [*result, viewed(f"{name}.row", source, replace(dense, shape=tuple(shape)), source)]


def side_by_side(name: str, sources: Sequence[str], parts: int, spec: TensorSpec) -> Op:
    """The flat tensor of these."""
    return Op(name, CAT, (tuple(map(Ref, sources)), 0, parts), (), (spec,))


def taken_apart(name: str, flat: str, spec: TensorSpec, sizes: Sequence[int], alias: str | None) -> list[Op]:
    """`<name>.0`, `<name>.1`, ...: the columns of each. alias: in whose storage the flat tensor lies, where
    they are views of it; None where they are copies, as of several rows views would be in pieces."""
    specs = tuple(TensorSpec((spec.shape[0], size), spec.dtype) for size in sizes)
    parts, target = f"{name}.parts", COPIES if alias is None else VIEWS
    return [
        Op(parts, target, (Ref(flat), tuple(sizes), 1), (), specs, alias),
        *(Op(f"{name}.{at}", GETITEM, (Ref(parts), at), (), (one,), alias) for at, one in enumerate(specs)),
    ]


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective of several tensors. lead: ops that end with the start; tail: those that begin with the
    wait. values, specs: what becomes of each."""

    lead: list[Op]
    tail: list[Op]
    values: list[str] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)


def scattered(
    name: str,
    axis: str,
    size: int,
    parts: int,
    sources: Sequence[str],
    given: Sequence[TensorSpec],
    shapes: Sequence[Sequence[int]],
    writes: Sequence[tuple[str, ...]],
) -> Moved:
    """The sum of tensors over an axis, of which each rank gets its rows. parts: in how many the rows are to
    be cut, by this axis and others that follow; given: of the sources; shapes: with the rows that are cut;
    writes: `Op.writes` of what becomes of each."""
    target, total = REDUCE_SCATTER.target, f"{name}.sum"
    lead: list[Op] = []
    rowed: list[str] = []
    specs: list[TensorSpec] = []
    for at, (source, spec, shape) in enumerate(zip(sources, given, shapes, strict=True)):
        views = with_rows(f"{name}.{at}", source, spec, shape)
        lead += views
        rowed.append(views[-1].name if views else source)
        specs.append(TensorSpec((-(-shape[0] // parts) * (parts // size), *shape[1:]), spec.dtype))
    first = specs[0]
    if len(given) == 1 and shapes[0][0] % parts == 0:
        lead.append(Op(name, target, (Ref(rowed[0]), "sum", axis, size), (), (first,)))
        tail = [Op(total, WAIT, (Ref(name),), (), (first,), name, writes=writes[0])]
        return Moved(lead, tail, [total], [first])
    sizes = [spec.numel * size // parts for spec in specs]
    flat = TensorSpec((parts, sum(sizes)), first.dtype)
    made = replace(flat, shape=(parts // size, sum(sizes)))
    lead.append(side_by_side(f"{name}.flat", rowed, parts, flat))
    lead.append(Op(name, target, (Ref(f"{name}.flat"), "sum", axis, size), (), (made,)))
    alias = name if parts == size else None
    tail = [Op(total, WAIT, (Ref(name),), (), (made,), name), *taken_apart(name, total, made, sizes, alias)]
    values = [f"{name}.{at}.grad" for at in range(len(specs))]
    for at, (value, spec) in enumerate(zip(values, specs, strict=True)):
        here = f"{name}.{at}"
        tail.append(viewed(value, here, spec, alias or here, writes=writes[at]))
    return Moved(lead, tail, values, specs)
