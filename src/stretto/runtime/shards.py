"""Sharded parameters: a rank's part of the full tensor, and the full tensor from all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from stretto.errors import UsageError
from stretto.ir.program import Job, Parameter, TensorSpec
from stretto.parallelize.parts import local_part, whole_of
from stretto.tensor.errors import mesh_name, tensor_name
from stretto.tensor.face import local


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a tensor: a box, or several. Of packed query, key and value columns a rank has a
    piece of each.

    full_shape: the tensor's shape. boxes: (offsets in the full tensor, view of what the rank has there).
    """

    full_shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    @staticmethod
    def all_of(tensor: torch.Tensor) -> Part:
        """A tensor that the rank has in full."""
        return Part(tuple(tensor.shape), (((0,) * tensor.dim(), tensor),))


def full_spec(job: Job, parameter: Parameter) -> TensorSpec:
    """The spec of the model's own tensor, of which a rank has `parameter.spec`."""
    shape = list(parameter.spec.shape)
    for shard in parameter.shards:
        shape[shard.dim] *= shard.parts(job.size(shard.axis))
    return TensorSpec(tuple(shape), parameter.spec.dtype)


def part_of(
    full: torch.Tensor, parameter: Parameter, job: Job, coordinates: Mapping[str, int]
) -> torch.Tensor:
    """The part of the rank at `coordinates`; a view where it can be."""
    for shard in parameter.shards:
        full = local_part(full, shard, job.size(shard.axis), coordinates[shard.axis])
    return full


def pieces_of(
    part: torch.Tensor, parameter: Parameter, job: Job, coordinates: Mapping[str, int]
) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Where the part of the rank at `coordinates` lies: (offsets in the full tensor, view) of each box.

    One box, or one for each packed block. What has the part's shape (a gradient, an optimizer's average)
    lies there too.
    """
    result = [((0,) * part.dim(), part)]
    for shard in parameter.shards:
        parts, at = shard.parts(job.size(shard.axis)), shard.part(coordinates[shard.axis])
        boxes: list[tuple[tuple[int, ...], torch.Tensor]] = []
        for offsets, kept in result:
            for block, piece in enumerate(kept.chunk(shard.blocks, dim=shard.dim)):
                first = (block * parts + at) * piece.shape[shard.dim]
                boxes.append(((*offsets[: shard.dim], first, *offsets[shard.dim + 1 :]), piece))
        result = boxes
    return result


def join(parts: Sequence[torch.Tensor], parameter: Parameter, job: Job, copy: int = 0) -> torch.Tensor:
    """The full tensor from the parts of all ranks along the axes, in the order of ranks. copy: which
    of those that have the same is taken. A parameter that is not sharded is the first part."""
    kept = list(parts)
    # The last of a job's axes is the fastest.
    for axis, size in reversed(job.axes):
        for shard in parameter.shards:
            if shard.axis == axis:
                first = copy % shard.copies
                kept = [whole_of(kept[at + first : at + size], shard) for at in range(0, len(kept), size)]
    return kept[0]


def part_here(name: str, tensor: torch.Tensor, spec: TensorSpec, rank: int, at: int) -> torch.Tensor:
    """What this rank has of a model's parameter or buffer: itself, or of one on a mesh its part, without a
    copy.

    spec: of the part that the plan has. at: the rank's number among those that share the stage. Raises
    UsageError where the tensor is on the mesh of other ranks, or lies on it otherwise than at the capture.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    part = local(tensor.detach())
    mesh = mesh_name(tensor.device_mesh)
    if part is None:
        raise UsageError(
            f"the plan has {name!r} on rank {rank}, but it is on mesh {mesh}, "
            "which does not hold the rank: capture this model anew"
        )
    if tuple(part.shape) != spec.shape or tensor.device_mesh.get_coordinate() != (at,):
        raise UsageError(
            f"the plan has {name!r} as parts of shape {list(spec.shape)}, and part {at} on rank {rank}, but "
            f"it is {tensor_name(tensor)}: capture this model anew"
        )
    return part
