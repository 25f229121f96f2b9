"""The face of tensors on meshes: `shard` a tensor onto a mesh, `reshard` it, and its `local` part back.

`reshard_all` does several reshards at one time.

A program written with these runs on all ranks as it is: each rank computes what is on its meshes, and
sees the descriptions of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
from stretto.tensor import errors
from stretto.tensor.clip import is_absent, layout_on, unfilled
from stretto.tensor.dtensor_adapter import new_spec, wrapped
from stretto.tensor.global_tensor import GlobalTensor
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.arguments import checked_placements
from stretto.tensor.reshard.move import reshard, reshard_all
from stretto.tensor.tracing_adapter import captured

__all__ = ["GlobalTensor", "local", "reshard", "reshard_all", "shard"]

Thing = TypeVar("Thing", torch.Tensor, nn.Module)


def shard(tensor: Thing, mesh: DeviceMesh, placements: Sequence[Placement] | None = None) -> Thing:
    """Put a tensor, or all parameters and buffers of a module, on a mesh.

    tensor: the full tensor, the same on every rank: each rank cuts its own part out of its own copy, and
        nothing is sent. Ranks off the mesh need its description alone: it may be on "meta" there. A parameter
        becomes a parameter; a tensor that wants a gradient becomes a new leaf that wants one.
        A module is changed in place, its parameters stay tied where they were, and it is returned.
    placements: one for each axis of the mesh: `Shard(dim)`, `Replicate()`; all Replicate() if None. With
        `Partial()` the first rank of a reduced axis has the value, and the others zeros.

    The tensor's memory is not kept: a part is a copy, unless it is the full tensor.
    Raises UsageError if arguments do not fit, if the tensor is on a mesh already, or is not a leaf.
    """
    if isinstance(tensor, nn.Module):
        done: dict[torch.Tensor, torch.Tensor] = {}
        for inner in tensor.modules():
            for kept in (inner._parameters, inner._buffers):
                for name, one in kept.items():
                    if one is not None:
                        if one not in done:
                            done[one] = _shard_tensor(one, mesh, placements)
                        kept[name] = done[one]  # type: ignore[assignment]
        return tensor
    return _shard_tensor(tensor, mesh, placements)


def local(x: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a tensor, a plain tensor; None on a rank that is off the tensor's mesh.

    Of a Partial tensor it is this rank's term. Differentiable where it is not None; gradients flow back only
    if all ranks that reshard the tensor, or what it was made from, run the same backward pass: call
    `backward()` on the tensor itself.
    Raises UsageError if `x` is on no mesh.
    """
    program = captured()
    if program is not None:
        part: torch.Tensor | None = program.local(x)
        return part
    if not isinstance(x, DTensor):
        raise errors.not_distributed("local", x)
    return None if is_absent(x.device_mesh) else x.to_local()


def _shard_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> GlobalTensor:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"shard: {type(tensor).__name__} {tensor!r} is not a tensor; make it one: torch.as_tensor"
        )
    where = f"shard of {errors.tensor_name(tensor)}"
    if isinstance(tensor, DTensor):
        raise UsageError(f"{where}: it is on a mesh already; use stretto.reshard(x, mesh, placements)")
    program = captured()
    if program is not None:
        placed: GlobalTensor = program.shard(tensor, mesh, placements)
        return placed
    if not tensor.is_leaf:
        raise UsageError(
            f"{where}: it is the result of an op that wants a gradient, and its other ranks' gradients would "
            "be lost; shard what it was made from, or its .detach()"
        )
    shape = tuple(tensor.shape)
    placements = checked_placements(where, shape, mesh, placements)
    agreement()  # from here on this rank's end is compared with the others', though it may skip all reshards
    spec = new_spec(mesh, placements, shape, tensor.stride(), tensor.dtype)
    part = _part(where, tensor.detach(), mesh, placements)
    made = wrapped(GlobalTensor, part, spec, tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        parameter: GlobalTensor = nn.Parameter(made, tensor.requires_grad)  # type: ignore[assignment]
        return parameter
    return made


def _part(
    where: str, tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    layout = layout_on(mesh, placements)
    rank = dist.get_rank()
    region = layout.region(tuple(tensor.shape), rank)
    if region is None or rank in layout.zero_ranks():
        return unfilled(tensor, layout, mesh.device_type)
    if tensor.is_meta:
        raise UsageError(
            f"{where}: it is on 'meta' and has no values, but rank {rank} is on mesh "
            f"{errors.mesh_name(mesh)}; give the ranks of the mesh the tensor itself"
        )
    part = tensor
    for dim, (start, stop) in enumerate(region):
        part = part.narrow(dim, start, stop - start)
    part = part.to(mesh.device_type)
    # A view would keep the memory of the full tensor.
    full = part.numel() == tensor.numel()
    return part if full else part.clone(memory_format=torch.contiguous_format)
