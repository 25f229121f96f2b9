"""What a reshard is asked to do: checked before anything moves, and as the text that ranks compare.

Layouts in short, for the command line and for tests (`read`, `between_meshes`): `2x4:S0RR` is a tensor of
three dims on two hosts of four devices. The letters are one for each DIM of the tensor: S0 is sharded over
mesh axis 0 (the hosts), S1 over axis 1 (the devices of a host), S01 over both, R is replicated. (The notation
of Zhuang et al., MLSys 2023.) PyTorch's placements are the other way round: one for each AXIS of the mesh.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
from stretto.ir.limits import MOST_RESHARDED
from stretto.tensor import errors
from stretto.tensor.clip import mesh_ranks
from stretto.tensor.layout import Layout, sharded_dim
from stretto.tensor.reshard.tasks import MODES, Hosts, Mode

HOW_SEVERAL = "stretto.reshard_all([(x, mesh, placements), ...])"
"""The line to write where several tensors, or several meshes, are given to `reshard`."""


@dataclass(frozen=True, slots=True)
class Move:
    """One of some tensors goes to a mesh. tensor: which of them."""

    tensor: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]


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
    result = checked_placements(where, tuple(x.shape), mesh, placements)
    if mesh.device_type != x.device_mesh.device_type:
        raise UsageError(
            f"{where}: to mesh {errors.mesh_name(mesh)} of device type {mesh.device_type!r}, from "
            f"{x.device_mesh.device_type!r}; both meshes must have one device type"
        )
    return result


def checked_moves(moves: Any) -> tuple[list[DTensor], tuple[Move, ...]]:
    """The distinct tensors, and the moves with placements whose dims are from 0.

    Raises UsageError if an argument does not fit.
    """
    if isinstance(moves, DTensor) or not isinstance(moves, Sequence):
        given = errors.tensor_name(moves) if isinstance(moves, DTensor) else f"a {type(moves).__name__}"
        raise UsageError(f"reshard_all: {given} is not a list of moves; write {HOW_SEVERAL}")
    tensors: list[DTensor] = []
    result: list[Move] = []
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
        result.append(Move(at, mesh, placements))
    return tensors, tuple(result)


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

    where: how the message begins. shape: of the full tensor. placements: None for replicated on every rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"{where}: the mesh is a {type(mesh).__name__}, {mesh!r}; give a "
            "torch.distributed.device_mesh.DeviceMesh"
        )
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    if isinstance(placements, Placement) or not isinstance(placements, Sequence):
        raise UsageError(f"{where}: placements {placements!r}; give a list, one for each axis of the mesh")
    try:
        layout = Layout(mesh_ranks(mesh), tuple(placements))
        layout.zero_ranks()  # refuses reductions that no value can be laid out for
        return tuple(Shard(sharded_dim(p, shape)) if isinstance(p, Shard) else p for p in layout.placements)
    except UsageError as error:
        raise UsageError(f"{where}, to mesh {errors.mesh_name(mesh)}: {error}") from None


WRITTEN = re.compile(r"([0-9]{1,12})x([0-9]{1,12}):((?:R|S[01]+)*)")
HELP = "write HOSTSxDEVICES:LETTERS with R, S0, S1 or S01 for each dim, such as 2x4:S0RR"


@dataclass(frozen=True, slots=True)
class Written:
    """A mesh of hosts x devices, and the placement of each of its two axes. dims: how many the tensor has."""

    hosts: int
    devices: int
    placements: tuple[Placement, Placement]
    dims: int

    def layout(self, first_rank: int) -> Layout:
        """The layout on ranks counted from a first one, host by host."""
        rows = range(first_rank, first_rank + self.hosts * self.devices, self.devices)
        return Layout(tuple(tuple(range(row, row + self.devices)) for row in rows), self.placements)


def read(text: str) -> Written:
    """A mesh and layout as written. Raises UsageError if it is not in this notation."""
    match = WRITTEN.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no mesh and layout; {HELP}")
    hosts, devices = int(match[1]), int(match[2])
    if not hosts or not devices:
        raise UsageError(f"{text!r}: a mesh needs at least one host of one device")
    if hosts * devices > MOST_RESHARDED:
        raise UsageError(
            f"{text!r}: {hosts * devices:,} devices are more than {MOST_RESHARDED:,}, whose boxes are all "
            "listed; give a mesh of fewer"
        )
    letters = re.findall(r"R|S[01]+", match[3])
    placements: list[Placement] = [Replicate(), Replicate()]
    for dim, letter in enumerate(letters):
        for axis in map(int, letter[1:]):
            if isinstance(placements[axis], Shard):
                raise UsageError(f"{text!r}: axis {axis} cuts twice; an axis of the mesh cuts one dim, once")
            placements[axis] = Shard(dim)
        if letter == "S10":
            raise UsageError(f"{text!r}: axes cut a dim from left to right, as in PyTorch; write S01")
    return Written(hosts, devices, (placements[0], placements[1]), len(letters))


def between_meshes(source: str, target: str, hosts: Hosts | None = None) -> tuple[Layout, Layout, Hosts]:
    """The layouts that two texts say, the target's mesh on hosts and ranks after the source's.

    hosts: whose rates are taken; which rank is on which host follows from the texts.
    """
    before, after = read(source), read(target)
    count = before.hosts * before.devices
    placed = [host for host in range(before.hosts) for _ in range(before.devices)]
    placed += [before.hosts + host for host in range(after.hosts) for _ in range(after.devices)]
    rates = hosts or Hosts(())
    at = Hosts(tuple(placed), rates.link_bytes_per_s, rates.latency_us)
    return before.layout(0), after.layout(count), at
