"""A tensor's rows: a rank's part of them along an axis, and all of them gathered again.

Rows are what the last dim is not: [2, 8, 16] has 16 rows of 16. Touches `stretto.ir` only.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.ir.collectives import ALL_GATHER
from stretto.ir.program import VIEW, WAIT, Op, Ref, TensorSpec


def rows_of(spec: TensorSpec) -> TensorSpec:
    """The same elements as a matrix of rows. spec: of a tensor in one piece, of at least one dim."""
    return TensorSpec((spec.numel // spec.shape[-1], spec.shape[-1]), spec.dtype)


def divides(spec: TensorSpec, size: int) -> bool:
    """Whether the tensor is in one piece, and `size` ranks can have equal parts of its rows."""
    if spec.stride is not None or len(spec.shape) < 2 or not spec.numel:
        return False
    return rows_of(spec).shape[0] % size == 0


def part_of(spec: TensorSpec, size: int) -> TensorSpec:
    """One rank's rows."""
    rows = rows_of(spec)
    return TensorSpec((rows.shape[0] // size, rows.shape[1]), rows.dtype)


def gather(start: str, part: str, name: str, spec: TensorSpec, axis: str, size: int) -> Iterator[Op]:
    """The ops that make `name`, of `spec`, from every rank's `part`; the first is called `start`."""
    rows = rows_of(spec)
    yield Op(start, ALL_GATHER.target, (Ref(part), axis, size), (), (rows,))
    wait = name if rows == spec else f"{start}_wait"
    yield Op(wait, WAIT, (Ref(start),), (), (rows,), start)
    if wait != name:
        yield Op(name, VIEW, (Ref(wait), spec.shape), (), (spec,), start)
