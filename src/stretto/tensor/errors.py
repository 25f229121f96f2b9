"""What is said when tensors on meshes are misused: which tensor, which meshes, and the line to write.

Every function returns an error to be raised. A tensor is named by its full shape, dtype, placements and
mesh, for that is how the user knows it; it has no other name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
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


def not_distributed(how: str, x: object) -> UsageError:
    """Something that is not on a mesh."""
    what = tensor_name(x) if isinstance(x, torch.Tensor) else f"{type(x).__name__} {x!r}"
    return UsageError(
        f"{how}: {what} is on no mesh; put it on one first: stretto.shard(it, mesh, placements)"
    )


def _saying(text: str) -> Callable[..., UsageError]:
    """A function (op, tensor, other) of an error that says so. In the text: {op}; {x}, the tensor; {other},
    another tensor, or a word; {placed}, the placements of the tensor on a mesh; {full}, those that replicate
    it; {reshard}, the line that does."""

    def error(op: object, x: torch.Tensor, other: object = "") -> UsageError:
        on_mesh = other if isinstance(other, DTensor) else x
        words = {"op": op, "x": tensor_name(x), "other": other}
        if isinstance(other, torch.Tensor):
            words["other"] = tensor_name(other)
        if isinstance(on_mesh, DTensor):
            full = f"[{', '.join(['Replicate()'] * on_mesh.device_mesh.ndim)}]"
            words["reshard"] = f"stretto.reshard(x, x.device_mesh, {full})"
            words |= {"placed": placements_name(on_mesh.placements), "full": full}
        return UsageError(text.format(**words))

    return error


two_meshes = _saying(
    "{op}: its tensors are on two meshes: {other}, and {x}; bring them to one mesh first, such as "
    "stretto.reshard(x, other.device_mesh, {full}) where other is the first of the two"
)
ranks_out_of_order = _saying(
    "{op} of {x}: it would redistribute its tensors, and on a mesh whose ranks do not ascend along each axis "
    "PyTorch's collectives put parts in the wrong places. Bring them to placements that need no "
    "communication with stretto.reshard, which is right there, or to a mesh with ascending ranks"
)
plain_with_gradient = _saying(
    "{op}: {x} wants a gradient, and is beside {other}; ranks off that mesh would have no gradient "
    "for it. Put it on the mesh first: stretto.shard(it, mesh, {full})"
)
plain_like_a_part = _saying(
    "{op}: {x} counts as the full tensor, the same on every rank, but it has the shape of one rank's "
    "part of {other}. If it is a part, say so: DTensor.from_local(it, mesh, {placed}); if it is the "
    "full one, stretto.shard(it, mesh, {full})"
)
plain_written = _saying(
    "{op}: it writes into {x}, and ranks off the mesh of {other} have nothing to write. Use the op that "
    "makes a new tensor, or write into one on that mesh"
)
sparse = _saying(
    "{op}: {x} is sparse, and is beside {other}; tensors on meshes are dense: use its .to_dense()"
)
shape_from_data = _saying(
    "{op}: the shape of its result depends on the values of {x}, which ranks off the mesh do not have. "
    "Compute it where the values are: full = {reshard}, then stretto.local(full), which is None off the "
    "mesh; to have it on all ranks, reshard to a mesh of all ranks first. torch.where and multiplying by "
    "a mask keep the shape"
)
random_op = _saying(
    "{op}: it draws at random for {x}, and ranks would not draw the same. Draw into a plain tensor, from "
    "one seed on all ranks, and stretto.shard it"
)
cannot_run = _saying(
    "{op} of {x}: {other}, and ranks off the mesh cannot follow. Compute it on a plain tensor: full = "
    "{reshard}, then stretto.local(full), which is None off the mesh"
)
wants_gradient = _saying("{op}: {x} wants a gradient, which an array has not; use x.detach()")
renumbers = _saying(
    "{op}: it changes the dims of {x} in place, which a tensor on a mesh cannot do. Use the op that makes"
    " a new view, without the underscore"
)
copy_written = _saying(
    "{op}: it writes into {x}, which {other} took out of a tensor along a dim that is sharded: it is a "
    "gathered copy, and the tensor would not change. Write into the full tensor: x = stretto.reshard(x, "
    "x.device_mesh, [Replicate()]) before it is cut; or make a new tensor: torch.where with a mask, "
    "torch.slice_scatter, torch.select_scatter, torch.cat"
)
copy_stale = _saying(
    "{op}: it reads {x}, which {other} took out of a tensor along a dim that is sharded: it is a gathered"
    " copy, and the tensor has been written into since. Take it out again after the write"
)
value_off_mesh = _saying(
    "{op}: rank {other} has no value of {x}, it is not on that mesh. Ask where it is: part = "
    "stretto.local(x), which is None off the mesh; or bring it to all ranks: stretto.reshard(x, mesh of "
    "all ranks, [Replicate()])"
)
part_off_mesh = _saying(
    "{op}: rank {other} has no part of {x}, it is not on that mesh. stretto.local(x) gives None there; a "
    "module style of tensor parallelism keeps the global view with use_local_output=False"
)
