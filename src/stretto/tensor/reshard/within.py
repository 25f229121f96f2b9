"""Reshard within one mesh: PyTorch's own collectives, and what DTensor keeps to itself, `Partial` targets.

1. Axes that become Partial go to Replicate first; all others go where they are wanted: DTensor.
2. Of a summed axis the first rank keeps the value, and the others hold zeros; of avg, max and min every
   rank keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor.clip import layout_on
from stretto.tensor.dtensor_adapter import local_of


def redistributed_part(
    x: DTensor, placements: Sequence[Placement], rank: int, async_op: bool = False
) -> torch.Tensor:
    """This rank's part of a tensor under other placements of its own mesh. All ranks of the mesh call it.

    x: a plain DTensor whose mesh holds this rank. async_op: the part may still be under way; the first op on
    it waits. Not differentiable.
    """
    becomes = [new.is_partial() and new != old for old, new in zip(x.placements, placements)]
    through = [Replicate() if summed else new for summed, new in zip(becomes, placements)]
    part = local_of(x)
    if list(x.placements) != through:
        part = local_of(x.redistribute(placements=through, async_op=async_op))
    if any(becomes):
        new_only = [p if summed else Replicate() for summed, p in zip(becomes, placements)]
        if rank in layout_on(x.device_mesh, tuple(new_only)).zero_ranks():
            return torch.zeros_like(part)
    return part
