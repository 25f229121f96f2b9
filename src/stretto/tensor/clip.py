"""Clip: an op on a rank that is not on its tensors' mesh is described, not computed.

The description comes from PyTorch's own sharding rules, the same that ranks on the mesh follow, so that all
ranks see the same tensors. No kernel runs and nothing is allocated: every absent tensor has the same local
part, one empty tensor for each dtype and device. DTensor's own path off the mesh (PyTorch 2.13) uses memory
for 0-d results, on the processor, and fails in convolution, argmin, argmax and `item`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor.dtensor_adapter import (
    Spec,
    described,
    first_of,
    given_back,
    local_of,
    plain_placement,
    propagated,
    unmasked,
)
from stretto.tensor.layout import Layout, MeshRanks, region_count, region_shape

Wrap = Callable[[torch.Tensor, Spec], DTensor]
"""Makes the tensor of a local part and a description."""


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def nothing(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The local part of every absent tensor of a dtype: no elements, no memory, and always the same."""
    return _nothing(dtype, torch.device(device))


def is_absent(mesh: DeviceMesh) -> bool:
    """Whether this rank is off a mesh."""
    return mesh.get_coordinate() is None


def unfilled(x: torch.Tensor, target: Layout, device_type: str) -> torch.Tensor:
    """Memory for this rank's part of a tensor in a layout; zeros where that is its term."""
    rank = dist.get_rank()
    region = target.region(tuple(x.shape), rank)
    if region is None:
        return nothing(x.dtype, device_type)
    make = torch.zeros if rank in target.zero_ranks() else torch.empty
    return make(region_shape(region), dtype=x.dtype, device=device_type)


@lru_cache(maxsize=256)
def mesh_ranks(mesh: DeviceMesh) -> MeshRanks:
    """The ranks of a mesh, as nested tuples. Kept, for to read them off a mesh takes kernels."""
    return Layout(tuple(mesh.mesh.tolist()), (Replicate(),) * mesh.ndim).mesh_ranks


@lru_cache(maxsize=4096)
def layout_on(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Layout:
    """The layout of a tensor on a device mesh."""
    return Layout(mesh_ranks(mesh), placements)


@lru_cache(maxsize=4096)
def has_empty_part(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> bool:
    """Whether some rank of a mesh has no element of a tensor: kernels differ in what they do with none, some
    fail, and some end the process."""
    plain = tuple(Replicate() if p.is_partial() else plain_placement(p) for p in placements)
    if all(p.is_replicate() for p in plain):
        return False
    return any(region_count(region) == 0 for region in layout_on(mesh, plain).regions(shape).values())


@lru_cache(maxsize=256)
def in_order(mesh: DeviceMesh) -> bool:
    """Whether ranks ascend along every axis of a mesh.

    Where they do not, DTensor's collectives that gather or scatter put parts in the wrong places, without a
    word (PyTorch 2.13): process groups sort their ranks, and the mesh's coordinates do not.
    """
    ranks = np.array(mesh_ranks(mesh))
    return all(bool((np.diff(ranks, axis=axis) > 0).all()) for axis in range(ranks.ndim))


def absent_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Wrap) -> Any:
    """What an op gives on a rank off the mesh.

    op: an overload of an operator. args, kwargs: its arguments, with at least one tensor on a mesh that does
    not have this rank, and no plain tensors but 0-d ones. Results in place are the arguments themselves.
    Raises what PyTorch's sharding rules raise, as the ranks on the mesh do.
    """
    device = local_of(first_of(args, kwargs)).device
    described_results = propagated(op, args, kwargs)

    def absent(spec: Spec) -> DTensor:
        return wrap(*unmasked(nothing(described(spec)[1], device), spec))

    written = given_back(op, args, kwargs)
    if written and not op._schema.returns:
        return None  # lists, such as the ops of optimizers write
    if written:  # it lies as it lay (`stretto.tensor.trusted`)
        return written[0] if len(written) == 1 else tuple(written)
    if described_results is None:
        return None
    if isinstance(described_results, Sequence):
        result = [None if spec is None else absent(spec) for spec in described_results]
        # One tensor list is a list; several results are a tuple.
        return result if len(op._schema.returns) == 1 else tuple(result)
    return absent(described_results)
