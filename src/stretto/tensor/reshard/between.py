"""Tensors go from their meshes to others, all at one time: one plan, carried out by the ranks of any of them.

1. Each rank makes its parts of the results, yet to be filled; zeros where its term of a sum is zero.
2. Every rank that is on one of the meshes plans all moves together, and all come to the same plan.
3. Messages go in the order of the plan, those of one tensor among those of others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor.clip import layout_on, nothing
from stretto.tensor.dtensor_adapter import local_of, new_spec
from stretto.tensor.global_tensor import GlobalTensor, global_tensor
from stretto.tensor.layout import Layout, region_shape
from stretto.tensor.reshard.execute import Part, execute
from stretto.tensor.reshard.forwarding import Together, plan_together
from stretto.tensor.reshard.hosts import Hosts
from stretto.tensor.reshard.lines import lines
from stretto.tensor.reshard.modes import Mode
from stretto.tensor.reshard.tasks import Tensor


@dataclass(frozen=True, slots=True)
class Move:
    """One of some tensors goes to a mesh. tensor: which of them."""

    tensor: int
    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def between(
    tensors: Mapping[int, GlobalTensor], moves: Sequence[Move], mode: Mode, in_flight_bytes: int
) -> list[GlobalTensor]:
    """The result of each move. All ranks of the program call it alike, for lines are made in one order.

    tensors: by the numbers that moves have for them; none of them Partial. All meshes are of one device type.
    Raises RunError if a rank that this one needs is lost.
    """
    rank = dist.get_rank()
    device_type = moves[0].mesh.device_type
    sources = {at: layout_on(x.device_mesh, x.placements) for at, x in tensors.items()}
    targets = [layout_on(move.mesh, move.placements) for move in moves]
    parts = [_unfilled(tensors[move.tensor], target, device_type) for move, target in zip(moves, targets)]
    ranks = {rank for layout in (*sources.values(), *targets) for rank in layout.ranks}
    group = lines().group(device_type, sorted(ranks))
    if rank in ranks:
        moves_of = {at: [i for i, move in enumerate(moves) if move.tensor == at] for at in tensors}
        asked = tuple(
            Tensor(tuple(x.shape), x.element_size(), sources[at], tuple(targets[i] for i in moves_of[at]))
            for at, x in tensors.items()
        )
        planned = _plan(asked, mode)
        held, wanted = [], []
        numbers = list(tensors)
        for which, chosen in planned.parts:
            at = numbers[which]
            shape = tuple(tensors[at].shape)
            held.append(Part(sources[at].region(shape, rank), local_of(tensors[at])))
            goes = [moves_of[at][choice] for choice in chosen]
            wanted.append([Part(targets[i].region(shape, rank), parts[i]) for i in goes])
        execute(planned.plan, held, wanted, lines(), group, in_flight_bytes)
    return [_result(tensors[move.tensor], move, part) for move, part in zip(moves, parts)]


def _unfilled(x: GlobalTensor, target: Layout, device_type: str) -> torch.Tensor:
    """Step 1, for one result."""
    rank = dist.get_rank()
    region = target.region(tuple(x.shape), rank)
    if region is None:
        return nothing(x.dtype, device_type)
    make = torch.zeros if rank in target.zero_ranks() else torch.empty
    return make(region_shape(region), dtype=x.dtype, device=device_type)


def _result(x: GlobalTensor, move: Move, part: torch.Tensor) -> GlobalTensor:
    strides = torch.empty(x.shape, device="meta").stride()
    return global_tensor(part, new_spec(move.mesh, move.placements, x.shape, strides, x.dtype))


@lru_cache(maxsize=4096)
def _plan(tensors: tuple[Tensor, ...], mode: Mode) -> Together:
    """Step 2."""
    return plan_together(tensors, hosts_of_launch(), mode)


def hosts_of_launch() -> Hosts:
    """Hosts as torchrun fills them; one for each rank where the launcher does not say."""
    world = dist.get_world_size()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Hosts.of(devices if devices > 0 and world % devices == 0 else 1, world)
