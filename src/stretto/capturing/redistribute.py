"""From one placement to another on a stage's mesh while a program is captured, by `stretto.parallelize.ops`.

All ranks of a mesh walk one program, so that nothing here may depend on the rank that captures; DTensor's own
way cuts out the part of the rank on which it runs.

    from             to Replicate           to Shard(d)                  to Partial()
    Replicate        -                      own slice                    rank 0 keeps it, others have zeros
    Shard(d)         all-gather             all-gather, own slice        all-gather, as Replicate
    Partial()        all-reduce             reduce-scatter               -

Parts must be equal: one program has one shape. DTensor has two inner placements: a shard of a dim that is
several in one, which is a Shard of the dim's blocks; and the sum of what each rank finds in its rows of a
table, before which indices become those of the rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
from stretto.parallelize import ops
from stretto.parallelize.tensor import AXIS
from stretto.tensor.dtensor_adapter import Spec, described
from stretto.tensor.layout import Layout
from stretto.tensor.tracing_adapter import elsewhere_of, keep_elsewhere, split_factor, table_rows

REDUCTIONS = {"sum": "sum", "avg": "sum", "max": "max", "min": "max"}
"""Reduction of a Partial -> that of the all-reduce: an average is divided after it, a minimum negated."""


def redistributed(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """A rank's part of a tensor under other placements of its mesh. Not differentiable.

    local: the part under `source`. Raises UsageError for parts that differ in size, and for placements that
    are neither Shard, Replicate nor Partial.
    """
    (old,), (new,) = source.placements, target.placements
    size: int = source.mesh.size()
    if old == new or size == 1:
        return local
    shape, _ = described(source)
    for placement in (old, new):
        check_placement(f"a tensor of shape {list(shape)}", shape, placement, size)
    if table_rows(new) is not None:
        return _own_rows(local, new, size)
    if table_rows(old) is not None:
        local = _found_here(local, old)
    if old.is_partial() and is_shard(new):
        return _reduced_to_shard(local, _reduction(old), new, size)
    if old.is_partial():
        local = _reduced(local, _reduction(old), size)
    elif is_shard(old):
        local = _gathered(local, old, size)
    if is_shard(new):
        return _own_part(local, new, size)
    if new.is_partial() and _reduction(new) == "sum":
        return torch.where(ops.index(local, AXIS, size) == 0, local, torch.zeros_like(local))
    return local


def message(old: Placement, new: Placement, shape: Sequence[int], size: int) -> Placement:
    """As what a tensor goes from one mesh to another of its size, for each byte to cross once if it can.

    What is smaller goes: a shard that is gathered where it arrives, and one that was cut before it left. A
    sum is taken before, to shards where a dim has equal parts for all.
    """
    if old.is_partial() and not is_shard(new):
        (found,) = Layout(tuple(range(size)), (Partial(),)).reduced(shape).placements
        assert isinstance(found, (Shard, Replicate))
        equal = isinstance(found, Shard) and shape[found.dim] % size == 0
        return found if equal else Replicate()
    if is_shard(new):
        return new
    return old


def is_shard(placement: Placement) -> bool:
    """Whether each rank holds a part: Shard, or DTensor's inner kind of it."""
    return not placement.is_partial() and not placement.is_replicate()


def check_placement(what: str, shape: Sequence[int], placement: Placement, size: int) -> None:
    """Raises UsageError if one program cannot have it. what: the tensor, in the message."""
    if is_shard(placement):
        dim: int = placement.dim  # type: ignore[attr-defined]
        blocks = split_factor(placement)
        if shape[dim] % (size * blocks):
            raise UsageError(
                f"{what} cannot be sharded equally over {AXIS} = {size} along dim {dim}: {shape[dim]} is not "
                f"a multiple of {size * blocks}. A captured program has parts of one size on all ranks: pad "
                "the dim, or place the tensor otherwise"
            )
        return
    plain = type(placement) is Partial or table_rows(placement) is not None
    if placement.is_partial() and not (plain and _reduction(placement) in REDUCTIONS):
        raise UsageError(
            f"{what} would become {placement!r}, which a captured program does not have: reshard it to "
            "[Replicate()] before the op"
        )


def _own_rows(indices: Tensor, new: Placement, size: int) -> Tensor:
    """Indices into a table of which each rank has equally many rows, as indices into this rank's."""
    total = table_rows(new)
    assert total is not None, "it is asked where it is one"
    assert total % size == 0, "the table is a parameter, and has equal parts"
    here = indices - ops.index(indices, AXIS, size) * (total // size)
    elsewhere = (here < 0) | (here >= total // size)
    keep_elsewhere(new, elsewhere)
    return here.masked_fill(elsewhere, 0)


def _found_here(local: Tensor, old: Placement) -> Tensor:
    """Zeros for what is in other ranks' rows."""
    elsewhere = elsewhere_of(old)
    if elsewhere.dim() < local.dim():
        elsewhere = elsewhere.unsqueeze(-1)
    return local.masked_fill(elsewhere, 0)


def _reduction(placement: Placement) -> str:
    found: str = placement.reduce_op  # type: ignore[attr-defined]
    return found


def _reduced(local: Tensor, reduction: str, size: int) -> Tensor:
    if reduction == "min":
        return -ops.all_reduce(-local, AXIS, size, "max")
    found = ops.all_reduce(local, AXIS, size, REDUCTIONS[reduction])
    return found / size if reduction == "avg" else found


def _reduced_to_shard(local: Tensor, reduction: str, new: Placement, size: int) -> Tensor:
    if REDUCTIONS[reduction] != "sum":
        return _own_part(_reduced(local, reduction, size), new, size)
    blocks, dim = _in_blocks(local, new)
    found = _joined(ops.reduce_scatter(blocks, dim, AXIS, size), new)
    return found / size if reduction == "avg" else found


def _gathered(local: Tensor, old: Placement, size: int) -> Tensor:
    blocks, dim = _in_blocks(local, old)
    return _joined(ops.all_gather(blocks, dim, AXIS, size), old)


def _own_part(whole: Tensor, new: Placement, size: int) -> Tensor:
    blocks, dim = _in_blocks(whole, new)
    return _joined(ops.own_chunk(blocks, dim, AXIS, size).contiguous(), new)


def _in_blocks(x: Tensor, placement: Placement) -> tuple[Tensor, int]:
    """The tensor with its sharded dim cut into blocks, and the dim of which each rank has a part."""
    dim: int = placement.dim  # type: ignore[attr-defined]
    count = split_factor(placement)
    if count == 1:
        return x, dim
    return x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :]), dim + 1


def _joined(x: Tensor, placement: Placement) -> Tensor:
    dim: int = placement.dim  # type: ignore[attr-defined]
    return x if split_factor(placement) == 1 else x.flatten(dim, dim + 1)
