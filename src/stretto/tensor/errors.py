"""What is said when tensors on meshes are misused: which tensor, which meshes, and the line to write.

Every function returns an error to be raised. A tensor is named by its whole shape, dtype, placements and
mesh, for that is how the user knows it; it has no other name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import RunError, UsageError
from stretto.tensor.clip import mesh_ranks


def mesh_name(mesh: DeviceMesh) -> str:
    """A mesh as a user writes it: its ranks, and the names of its axes if it has any."""
    names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"{json.dumps(mesh_ranks(mesh))}{names}"


def placements_name(placements: Sequence[Placement]) -> str:
    """Placements as a user writes them."""
    return f"[{', '.join(_placement_name(placement) for placement in placements)}]"


def _placement_name(placement: Placement) -> str:
    if placement.is_partial():
        reduction = getattr(placement, "reduce_op", "sum")
        return "Partial()" if reduction == "sum" else f'Partial("{reduction}")'
    dim = getattr(placement, "dim", None)
    return "Replicate()" if dim is None else f"{type(placement).__name__}({dim})"


def tensor_name(x: torch.Tensor) -> str:
    """One tensor in a message."""
    what = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    if not isinstance(x, DTensor):
        return f"plain tensor {what}"
    return f"tensor {what} {placements_name(x.placements)} on mesh {mesh_name(x.device_mesh)}"


def two_meshes(op: object, one: DTensor, other: DTensor) -> UsageError:
    """An op has tensors from two meshes."""
    return UsageError(
        f"{op}: its tensors are on two meshes: {tensor_name(one)}, and {tensor_name(other)}; bring them to "
        "one mesh first, such as stretto.reshard(other, first.device_mesh, "
        f"{_target_for(one, other)}) where first is the one of shape {tuple(one.shape)} on mesh "
        f"{mesh_name(one.device_mesh)} and other the one of shape {tuple(other.shape)} on mesh "
        f"{mesh_name(other.device_mesh)}"
    )


def _target_for(one: DTensor, other: DTensor) -> str:
    """Placements that fit: the first tensor's where both have its dims, else whole on every rank."""
    fits = one.ndim == other.ndim and not any(placement.is_partial() for placement in one.placements)
    return (
        placements_name(one.placements)
        if fits
        else "[" + ", ".join(["Replicate()"] * one.device_mesh.ndim) + "]"
    )


def plain_with_gradient(op: object, plain: torch.Tensor, beside: DTensor) -> UsageError:
    """A plain tensor that wants a gradient stands beside a distributed one."""
    return UsageError(
        f"{op}: {tensor_name(plain)} wants a gradient, and stands beside {tensor_name(beside)}; ranks off "
        "that mesh would have no gradient for it. Put it on the mesh first: "
        f"stretto.shard(it, mesh, [{', '.join(['Replicate()'] * beside.device_mesh.ndim)}])"
    )


def plain_like_a_part(op: object, plain: torch.Tensor, beside: DTensor) -> UsageError:
    """A plain tensor has the shape of a rank's part, not of the whole."""
    return UsageError(
        f"{op}: {tensor_name(plain)} counts as the whole tensor, the same on every rank, but it has the "
        f"shape of one rank's part of {tensor_name(beside)}. If it is a part, say so: "
        f"DTensor.from_local(it, mesh, {placements_name(beside.placements)}); if it is the whole, "
        f"stretto.shard(it, mesh, [{', '.join(['Replicate()'] * beside.device_mesh.ndim)}])"
    )


def plain_written(op: object, plain: torch.Tensor, beside: DTensor) -> UsageError:
    """An op would write values of a distributed tensor into a plain one."""
    return UsageError(
        f"{op}: it writes into {tensor_name(plain)}, and ranks off the mesh of {tensor_name(beside)} have "
        "nothing to write. Use the op that makes a new tensor, or write into one on that mesh"
    )


def ranks_out_of_order(op: object, tensors: Sequence[torch.Tensor]) -> UsageError:
    """An op would redistribute on a mesh where PyTorch's collectives put parts in the wrong places."""
    found = [x for x in tensors if isinstance(x, DTensor)]
    return UsageError(
        f"{op} of {', and of '.join(tensor_name(x) for x in found)}: it would redistribute them, and on a "
        "mesh whose ranks do not ascend along each axis PyTorch's collectives put parts in the wrong places. "
        "Bring them to placements that need no communication with stretto.reshard, which is right there, or "
        "to a mesh with ascending ranks"
    )


def shape_from_data(op: object, x: DTensor) -> UsageError:
    """An op whose result has a shape that depends on the data."""
    return UsageError(
        f"{op}: the shape of its result depends on the values of {tensor_name(x)}, which ranks off the mesh "
        "do not have. Compute it where the values are: full = stretto.reshard(x, x.device_mesh, "
        f"[{', '.join(['Replicate()'] * x.device_mesh.ndim)}]), then stretto.local(full), which is None off "
        "the mesh; to have it on all ranks, reshard to a mesh of all ranks first. torch.where and "
        "multiplying by a mask keep the shape"
    )


def _whole(x: DTensor) -> str:
    return f"stretto.reshard(x, x.device_mesh, [{', '.join(['Replicate()'] * x.device_mesh.ndim)}])"


def random_op(op: object, x: DTensor) -> UsageError:
    """An op that draws, and has no way to draw for a tensor on a mesh."""
    return UsageError(
        f"{op}: it draws at random for {tensor_name(x)}, and ranks would not draw the same. Draw into a "
        "plain tensor, from one seed on all ranks, and stretto.shard it"
    )


def cannot_run(op: object, x: DTensor, reason: str) -> UsageError:
    """An op that no rank off the mesh can describe."""
    return UsageError(
        f"{op} of {tensor_name(x)}: {reason}, and ranks off the mesh cannot follow. Compute it on a plain "
        f"tensor: whole = {_whole(x)}, then stretto.local(whole), which is None off the mesh"
    )


def wants_gradient(how: str, x: DTensor) -> UsageError:
    """An array of a tensor that wants a gradient."""
    return UsageError(f"{how}: {tensor_name(x)} wants a gradient, which an array has not; use x.detach()")


def sparse(op: object, plain: torch.Tensor, beside: DTensor) -> UsageError:
    """A sparse tensor stands beside a distributed one."""
    return UsageError(
        f"{op}: {tensor_name(plain)} is sparse, and stands beside {tensor_name(beside)}; tensors on meshes "
        "are dense: use its .to_dense()"
    )


def renumbers(op: object, x: DTensor) -> UsageError:
    """An op that changes a tensor's dims in place."""
    return UsageError(
        f"{op}: it changes the dims of {tensor_name(x)} in place, which a tensor on a mesh cannot do. Use "
        "the op that makes a new view, without the underscore"
    )


def copy_written(op: object, x: DTensor, view: str) -> UsageError:
    """A write into what should be a view, and is a copy."""
    return UsageError(
        f"{op}: it writes into {tensor_name(x)}, which {view} took out of a tensor along a dim that is "
        "sharded: it is a gathered copy, and the tensor would not change. Write into the whole: "
        "x = stretto.reshard(x, x.device_mesh, [Replicate()]) before it is cut; or make a new tensor: "
        "torch.where with a mask, torch.slice_scatter, torch.select_scatter, torch.cat"
    )


def copy_stale(op: object, x: DTensor, view: str) -> UsageError:
    """A read of what should be a view, after a write into what it should show."""
    return UsageError(
        f"{op}: it reads {tensor_name(x)}, which {view} took out of a tensor along a dim that is sharded: it "
        "is a gathered copy, and the tensor has been written into since. Take it out again after the write"
    )


def value_off_mesh(op: object, x: DTensor, rank: int) -> UsageError:
    """The value of a tensor is asked for on a rank that does not have it."""
    return UsageError(
        f"{op}: rank {rank} has no value of {tensor_name(x)}, it is not on that mesh. Ask where it is: "
        "part = stretto.local(x), which is None off the mesh; or bring it to all ranks: "
        "stretto.reshard(x, mesh of all ranks, [Replicate()])"
    )


def part_off_mesh(x: DTensor, rank: int, how: str) -> UsageError:
    """`to_local` or `full_tensor` on a rank that has no part."""
    return UsageError(
        f"{how}: rank {rank} has no part of {tensor_name(x)}, it is not on that mesh. stretto.local(x) gives "
        "None there; a module style of tensor parallelism keeps the whole view with use_local_output=False"
    )


def not_distributed(how: str, x: object) -> UsageError:
    """Something that is not on a mesh."""
    what = tensor_name(x) if isinstance(x, torch.Tensor) else f"{type(x).__name__} {x!r}"
    return UsageError(
        f"{how}: {what} is on no mesh; put it on one first: stretto.shard(it, mesh, placements)"
    )


def disagreement(rank: int, number: int, mine: str, theirs: str) -> RunError:
    """Two ranks came to the same reshard with different arguments."""
    return RunError(
        f"rank {rank}: reshard number {number} of this run is {mine}; but {theirs}. All ranks, those off "
        "the meshes too, must call stretto.reshard in the same order, with the same shape, meshes and "
        "placements; look for a call, or a backward pass, that only some ranks make"
    )
