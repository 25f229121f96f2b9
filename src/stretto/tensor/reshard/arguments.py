"""What a reshard is asked to do: checked before anything moves, and as the text that ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
from stretto.tensor import errors
from stretto.tensor.clip import layout_on
from stretto.tensor.layout import sharded_dim
from stretto.tensor.reshard.between import Move
from stretto.tensor.reshard.modes import MODES, Mode

HOW_SEVERAL = "stretto.reshard_all([(x, mesh, placements), ...])"
"""The line to write where several tensors, or several meshes, are given to `reshard`."""


def checked_move(
    x: Any, mesh: Any, placements: Sequence[Placement], which: str = "reshard"
) -> tuple[Placement, ...]:
    """Placements with dims from 0. which: how a message begins. Raises UsageError if one does not fit."""
    if isinstance(x, (list, tuple)):
        raise UsageError(f"{which}: takes one tensor, not a {type(x).__name__}; for several: {HOW_SEVERAL}")
    if not isinstance(x, DTensor):
        raise errors.not_distributed(which, x)
    where = f"{which} of {errors.tensor_name(x)}"
    if isinstance(mesh, (list, tuple)) and any(isinstance(one, DeviceMesh) for one in mesh):
        raise UsageError(f"{where}: takes one DeviceMesh, not {len(mesh)}; for several: {HOW_SEVERAL}")
    found = checked_placements(where, tuple(x.shape), mesh, placements)
    if mesh.device_type != x.device_mesh.device_type:
        raise UsageError(
            f"{where}: to mesh {errors.mesh_name(mesh)} of device type {mesh.device_type!r}, from "
            f"{x.device_mesh.device_type!r}; both meshes must have one device type"
        )
    return found


def checked_moves(moves: Any) -> tuple[list[DTensor], tuple[Move, ...]]:
    """The distinct tensors, and the moves with placements whose dims are from 0.

    Raises UsageError if an argument does not fit.
    """
    if isinstance(moves, DTensor) or not isinstance(moves, Sequence):
        given = errors.tensor_name(moves) if isinstance(moves, DTensor) else f"a {type(moves).__name__}"
        raise UsageError(f"reshard_all: {given} is not a list of moves; write {HOW_SEVERAL}")
    tensors: list[DTensor] = []
    found: list[Move] = []
    for number, move in enumerate(moves):
        which = f"reshard_all, move {number}"
        if isinstance(move, DTensor) or not isinstance(move, Sequence) or len(move) != 3:
            what = errors.tensor_name(move) if isinstance(move, DTensor) else repr(move)
            raise UsageError(f"{which}: {what} is not a tensor, its mesh and its placements: {HOW_SEVERAL}")
        x, mesh, placements = move
        placements = checked_move(x, mesh, placements, which)
        first = tensors[0] if tensors else x
        if mesh.device_type != first.device_mesh.device_type:
            raise UsageError(
                f"{which} of {errors.tensor_name(x)}: it is of device type {mesh.device_type!r}, and move 0, "
                f"of {errors.tensor_name(first)}, of {first.device_mesh.device_type!r}; call reshard_all for "
                "each device type"
            )
        at = next((at for at, one in enumerate(tensors) if one is x), len(tensors))
        if at == len(tensors):
            tensors.append(x)
        found.append(Move(at, mesh, placements))
    return tensors, tuple(found)


def check_way(tensors: Sequence[DTensor], mode: Mode, in_flight_bytes: int) -> None:
    """Raises UsageError if there is no such mode, or no room for messages."""
    where = f"reshard of {', and of '.join(errors.tensor_name(x) for x in tensors) or 'nothing'}"
    if mode not in MODES:
        raise UsageError(f"{where}: mode={mode!r}; it is one of {', '.join(MODES)}")
    if not isinstance(in_flight_bytes, int) or in_flight_bytes < 1:
        raise UsageError(f"{where}: in_flight_bytes={in_flight_bytes!r}; give a number of bytes, above 0")


def text_of(tensors: Sequence[DTensor], moves: Sequence[Move], mode: Mode, in_flight_bytes: int) -> str:
    """What ranks compare: everything that their messages depend on. Which moves are of one tensor, too."""
    first: dict[int, int] = {}
    words = []
    for number, move in enumerate(moves):
        again = first.setdefault(move.tensor, number) != number
        name = errors.tensor_name(tensors[move.tensor])
        what = f"the tensor of move {first[move.tensor]}" if again else name
        words.append(
            f"of {what} to {errors.placements_name(move.placements)} on mesh {errors.mesh_name(move.mesh)}"
        )
    return f"{', and '.join(words) or 'of nothing'} ({mode}, in_flight_bytes={in_flight_bytes})"


def checked_placements(
    where: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement] | None
) -> tuple[Placement, ...]:
    """Placements of a tensor on a mesh, their dims from 0. Raises UsageError if they do not fit it.

    where: how the message begins. shape: of the whole tensor. placements: None for the whole on every rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"{where}: the mesh is a {type(mesh).__name__}, {mesh!r}; give a "
            "torch.distributed.device_mesh.DeviceMesh"
        )
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise UsageError(f"{where}: placements {placements!r}; give a list, one for each axis of the mesh")
    if len(placements) != mesh.ndim:
        raise UsageError(
            f"{where}: mesh {errors.mesh_name(mesh)} has {mesh.ndim} axes, but there are {len(placements)} "
            f"placements {list(placements)}; give one for each axis"
        )
    found: list[Placement] = []
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            try:
                found.append(Shard(sharded_dim(placement, shape)))
            except UsageError as error:
                raise UsageError(f"{where}, axis {axis} of mesh {errors.mesh_name(mesh)}: {error}") from None
        elif type(placement) is Replicate or isinstance(placement, Partial):
            found.append(placement)
        else:
            raise UsageError(
                f"{where}: axis {axis} of mesh {errors.mesh_name(mesh)} has {placement!r}; use Shard(dim), "
                "Replicate() or Partial()"
            )
    layout_on(mesh, tuple(found)).zero_ranks()  # refuses reductions that no value can be laid out for
    return tuple(found)
