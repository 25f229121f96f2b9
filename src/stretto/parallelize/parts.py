"""A sharded parameter's parts: the shape of one, the slice that it is of the full tensor, the full tensor
from all.

Knows shards and tensors; nothing of modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stretto.ir.program import Shard


def local_shape(shape: Sequence[int], shard: Shard, size: int) -> tuple[int, ...]:
    """The shape of one rank's part."""
    return tuple(n // shard.parts(size) if dim == shard.dim else n for dim, n in enumerate(shape))


def local_part(full: Tensor, shard: Shard, size: int, index: int) -> Tensor:
    """The part of rank `index`: its slice of every block along the shard's dim (a view for one block)."""
    blocks = full.chunk(shard.blocks, dim=shard.dim)
    parts = [block.chunk(shard.parts(size), dim=shard.dim)[shard.part(index)] for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.dim)


def full_of(parts: list[Tensor], shard: Shard) -> Tensor:
    """The inverse of `local_part`, from the parts of all ranks in order; of copies, the first."""
    parts = parts[:: shard.copies]
    if shard.blocks == 1:
        return torch.cat(parts, dim=shard.dim)
    pieces = [part.chunk(shard.blocks, dim=shard.dim) for part in parts]
    return torch.cat([piece[b] for b in range(shard.blocks) for piece in pieces], dim=shard.dim)


def bounds(full: int, parts: int) -> list[int]:
    """Where parts of `full` items begin and end, as equal as can be; at most as many parts."""
    return list(dict.fromkeys(-(-full * k // parts) for k in range(parts + 1)))


def lengths_of(full: int, count: int) -> list[int]:
    """Chunks of a sequence, as equal as can be."""
    return [end - start for start, end in pairwise(bounds(full, count))]
