"""The room of `stretto.tensor` that knows what tracing needs of DTensor's private corners (2.11 to 2.13).

What it uses, so that the next release breaks this file alone, with a test for each:

    DeviceMesh._coordinate_on_dim                   where on a mesh this rank stands
    redistribute_local_tensor, in three modules     what DTensor calls to change placements
    _StridedShard, by its `split_factor`            the shard of a dim that is several dims in one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.tensor._api
import torch.distributed.tensor._dispatch
import torch.distributed.tensor._redistribute
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor.dtensor_adapter import Spec

Redistribute = Callable[[torch.Tensor, Spec, Spec], torch.Tensor]
"""A rank's part, and what it is a part of before and after -> the part after."""


@contextmanager
def standing_first(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """While the context lasts, this rank stands at the first place of each of these meshes."""
    kept = [(mesh, mesh._coordinate_on_dim) for mesh in meshes]
    try:
        for mesh in meshes:
            mesh._coordinate_on_dim = (0,) * mesh.ndim
        yield
    finally:
        for mesh, coordinate in kept:
            mesh._coordinate_on_dim = coordinate


@contextmanager
def redistributing(how: Redistribute) -> Iterator[None]:
    """While the context lasts, DTensor changes placements in this way, wherever it does so."""
    inside = torch.distributed.tensor
    rooms: list[Any] = [inside._api, inside._dispatch, inside._redistribute]
    own = inside._redistribute.redistribute_local_tensor

    def redistribute(local: torch.Tensor, source: Spec, target: Spec, **_options: Any) -> torch.Tensor:
        return how(local, source, target)

    try:
        for room in rooms:
            assert room.redistribute_local_tensor is own, "PyTorch has it under one name"
            room.redistribute_local_tensor = redistribute
        yield
    finally:
        for room in rooms:
            room.redistribute_local_tensor = own


def split_factor(placement: Placement) -> int:
    """Into how many blocks DTensor's inner shard cuts its dim before each rank takes its part of each block:
    1 for a plain Shard."""
    return int(getattr(placement, "split_factor", 1))
