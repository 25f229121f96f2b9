"""What a call makes of chunks, as if these were ranks: cut, a partial, equal, or none of it.

1. The call is made on the first chunk and on the full tensor, without values. Both must give the same
ops.
2. The ops of the chunk are placed in order (`stretto.ir.placements`). A view of a chunk may be a cut in
   several ways: those that make the shape that the full tensor has there are kept, and where there is
   none, the result has no placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from stretto.ir.placement import EqualReducedError, NeedsEqualError, Placement, RefusedError, part
from stretto.ir.placements import Placer
from stretto.parallelize.recorded_adapter import Recorded, tree_flatten
from stretto.tensor.dtensor_adapter import without_values

AXIS = "chunks"


def placements_of(
    call: Callable[[Sequence[Any]], Any],
    chunk_leaves: Sequence[Any],
    replicated_leaves: Sequence[Any],
    kept: Sequence[Placement | None],
    count: int,
    ratio: Fraction,
) -> list[Placement] | None:
    """Of each tensor that the call returns; None where one has no placement, or something is no tensor.

    call: of a list of arguments. kept: how those of `chunk_leaves` that are cut are. count: of chunks. ratio:
    of the full tensor's length to the first chunk's.
    """
    chunk, full = Recorded(), Recorded()
    try:
        with without_values():
            parts, full_values = [_like(x) for x in chunk_leaves], [_like(x) for x in replicated_leaves]
            with chunk:
                outs, _ = tree_flatten(call(parts))
            with full:
                others, _ = tree_flatten(call(full_values))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError):
        return None  # what is wrong with the full tensor, the full tensor will say
    if not outs or not all(isinstance(out, Tensor) for out in outs):
        return None
    same = [op.target for op in chunk.ops] == [op.target for op in full.ops]
    if not same or chunk.writes or any(op.random for op in chunk.ops):
        return None
    given = {chunk.name(p): of_it for p, of_it in zip(parts, kept, strict=True) if of_it is not None}
    placer = Placer(AXIS, count, given, exact=True)
    try:
        for op, other in zip(chunk.ops, full.ops, strict=True):
            placer.place(op, chunk.specs)
            if len(op.outputs) == 1 and op.outputs[0] is not None and other.outputs[0] is not None:
                fit = _fitting(placer.of(op.name), op.outputs[0].shape, other.outputs[0].shape, ratio)
                if fit is None:
                    return None
                placer.values[op.name] = fit
    except (RefusedError, NeedsEqualError, EqualReducedError):
        return None
    result = [
        _fitting(placer.of(chunk.name(out)), out.shape, other.shape, ratio)
        for out, other in zip(outs, others, strict=True)
    ]
    return None if None in result else [p for p in result if p is not None]


def _like(value: Any) -> Any:
    """A tensor of the same shape without values."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _fitting(
    placement: Placement, chunk: Sequence[int], unsharded: Sequence[int], ratio: Fraction
) -> Placement | None:
    """The placement with the cuts that make a full value of that shape of chunks of this; None where none
    does.
    ratio: of the full tensor's length to the first chunk's."""
    if len(chunk) != len(unsharded):
        return None
    unlike = [dim for dim, (n, m) in enumerate(zip(chunk, unsharded, strict=True)) if n != m]
    if placement.kind in ("equal", "sum") and not unlike:
        return placement
    if len(unlike) != 1 or unsharded[unlike[0]] != chunk[unlike[0]] * ratio:
        return None
    if placement.kind == "equal" and unlike[0] in placement.uniform:
        return part(unlike[0])
    at = tuple(cut for cut in placement.at if cut[0] == unlike[0])
    return Placement("part", at) if placement.kind == "part" and at else None
