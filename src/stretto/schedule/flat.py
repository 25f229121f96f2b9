"""Tensors side by side in a flat one, so that one collective serves all of them, and apart again.

Rows of a flat tensor are parts: what goes to each rank, or comes from it. Each tensor is cut along dim 0 into
as many parts, padded with zeros to equal ones, and has some columns, as FSDP2 lays out its buckets (PyTorch
#121081, `_chunk_cat`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from stretto.ir.program import GETITEM, VIEW, Op, Ref, TensorSpec

LARGE_BYTES = 4 * 2**20
"""What has at least so many bytes travels by itself. Assumed: its transfer takes far longer than a
collective's latency on any link, and a copy into a bucket would cost memory and time. A bucket that has grown
to it is closed, for the same reason: more would only start later."""

CAT = "aten._chunk_cat.default"
VIEWS, COPIES = "aten.split_with_sizes.default", "aten.split_with_sizes_copy.default"

T = TypeVar("T")


def is_large(nbytes: int) -> bool:
    """Whether so much travels by itself."""
    return nbytes >= LARGE_BYTES


def in_buckets(items: Sequence[T], nbytes: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Those that travel together, in their order."""
    first = total = 0
    for at, item in enumerate(items, 1):
        total += nbytes(item)
        if is_large(total) or at == len(items):
            yield items[first:at]
            first, total = at, 0


def viewed(name: str, source: str, spec: TensorSpec, alias: str, writes: str | None = None) -> Op:
    """The source in another shape."""
    return Op(name, VIEW, (Ref(source), spec.shape), (), (spec,), alias, writes=writes)


def with_rows(name: str, source: str, spec: TensorSpec) -> list[Op]:
    """What gives a number, which has no dims, one of rows; nothing for what has some."""
    return [] if spec.shape else [viewed(f"{name}.row", source, TensorSpec((1,), spec.dtype), source)]


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
