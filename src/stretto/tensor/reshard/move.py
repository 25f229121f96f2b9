"""`reshard` and `reshard_all`: tensors to other placements, or to other meshes, forward and backward.

1. All ranks agree that they make the same reshard                         arguments, agree
2. On one mesh: DTensor's collectives, where they are right
3. Else: Partial axes are reduced on the source mesh; transfers of all
   tensors are planned together, and carried out by the ranks of any mesh   plan, execute
4. Ranks off the target mesh have the description alone                    clip
5. A gradient goes back to the source's mesh and placements, with those of
   the tensors that went together; where one tensor went to several
   meshes, it is the sum. A Partial source has a full gradient.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor.clip import in_order, is_absent, layout_on, mesh_ranks, nothing, unfilled
from stretto.tensor.dtensor_adapter import local_of, new_spec, plain_placement, spec_of
from stretto.tensor.global_tensor import GlobalTensor, as_global, global_tensor, moved_by
from stretto.tensor.parts import part_under
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.arguments import Move, check_way, checked_move, checked_moves, text_of
from stretto.tensor.reshard.execute import LocalBox, execute, lines
from stretto.tensor.reshard.plan import Together, plan_together
from stretto.tensor.reshard.tasks import Hosts, Mode, Tensor
from stretto.tensor.tracing_adapter import captured


def between(
    tensors: Mapping[int, GlobalTensor], moves: Sequence[Move], mode: Mode, in_flight_bytes: int
) -> list[GlobalTensor]:
    """The result of each move. All ranks of the program call it the same, for lines are made in one order.

    tensors: by the numbers that moves have for them; none of them Partial. All meshes are of one device type.
    Raises RunError if a rank that this one needs is lost.
    """
    rank = dist.get_rank()
    device_type = moves[0].mesh.device_type
    sources = {at: layout_on(x.device_mesh, x.placements) for at, x in tensors.items()}
    targets = [layout_on(move.mesh, move.placements) for move in moves]
    parts = [unfilled(tensors[move.tensor], target, device_type) for move, target in zip(moves, targets)]
    ranks = {rank for layout in (*sources.values(), *targets) for rank in layout.ranks}
    group = lines().group(device_type, sorted(ranks))
    if rank in ranks:
        moves_of = {at: [i for i, move in enumerate(moves) if move.tensor == at] for at in tensors}
        asked = tuple(
            Tensor(tuple(x.shape), x.element_size(), sources[at], tuple(targets[i] for i in moves_of[at]))
            for at, x in tensors.items()
        )
        planned = _plan(asked, mode)
        kept, wanted = [], []
        numbers = list(tensors)
        for which, chosen in planned.parts:
            at = numbers[which]
            shape = tuple(tensors[at].shape)
            kept.append(LocalBox(sources[at].region(shape, rank), local_of(tensors[at])))
            goes = [moves_of[at][choice] for choice in chosen]
            wanted.append([LocalBox(targets[i].region(shape, rank), parts[i]) for i in goes])
        execute(planned.plan, kept, wanted, lines(), group, in_flight_bytes)
    return [_result(tensors[move.tensor], move, part) for move, part in zip(moves, parts)]


def _result(x: GlobalTensor, move: Move, part: torch.Tensor) -> GlobalTensor:
    strides = torch.empty(x.shape, device="meta").stride()
    return global_tensor(part, new_spec(move.mesh, move.placements, x.shape, strides, x.dtype))


@lru_cache(maxsize=4096)
def _plan(tensors: tuple[Tensor, ...], mode: Mode) -> Together:
    return plan_together(tensors, hosts_of_launch(), mode)


def hosts_of_launch() -> Hosts:
    """Hosts as torchrun fills them; one for each rank where the launcher does not say."""
    world = dist.get_world_size()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Hosts.of(devices if devices > 0 and world % devices == 0 else 1, world)


IN_FLIGHT_BYTES = 256 << 20
"""How much may wait to be sent, and to be received, on a rank by default. Assumed: small beside an
accelerator's memory, and many pieces."""


def reshard(
    x: DTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    mode: Mode = "broadcast",
) -> GlobalTensor:
    """A tensor on another mesh, or with other placements. Differentiable.

    Every rank of the program calls it, in the same order, also those off both meshes.

    x: a tensor on a mesh, any shape and dtype. mesh: where it goes: of any size and shape, disjoint from the
    source's or not. placements: one for each axis of `mesh`: `Shard(dim)`, `Replicate()`, `Partial()`.
    in_flight_bytes: how much may wait to be sent, and to be received, on this rank.
    mode: how a box goes to several ranks; see `stretto.tensor.reshard.tasks`.

    No rank keeps more of the tensor than its parts, and pieces under way. Returns when this rank's part is
    there. Raises UsageError for arguments that do not fit, RunError if ranks do not make the same reshard or
    one is lost.
    """
    program = captured()
    if program is not None:
        resharded: GlobalTensor = program.reshard(x, mesh, placements)
        return resharded
    placements = checked_move(x, mesh, placements)
    check_way([x], mode, in_flight_bytes)
    return _agreed([x], (Move(0, mesh, placements),), _Way(True, in_flight_bytes, mode))[0]


def reshard_all(
    moves: Sequence[tuple[DTensor, DeviceMesh, Sequence[Placement]]],
    *,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    mode: Mode = "broadcast",
) -> tuple[GlobalTensor, ...]:
    """Several tensors at one time, or one tensor to several meshes, or both. Differentiable.

        h, skip = stretto.reshard_all([(h, second, [Shard(0)]), (skip, second, [Replicate()])])
        near, far = stretto.reshard_all([(x, second, [Shard(0)]), (x, third, [Shard(0)])])

    moves: (x, mesh, placements) of each, as `reshard` takes them; all meshes of one device type. Their
    messages are planned together, so that they share the hosts' links well. Where the same tensor goes to
    several meshes, ranks that receive a box of it hand it on to those of the other meshes if that ends
    earlier, or takes less of the links: it leaves its own host once.
    in_flight_bytes: of all moves together. mode: as in `reshard`.

    Returns the result of each move. In the backward pass the gradients of all results go back together, once
    all are there; a result that nothing used has none, and nothing is sent for it. The gradient of a tensor
    that went to several meshes is their sum.
    Every rank of the program calls it, with equal moves. Raises what `reshard` raises.
    """
    program = captured()
    if program is not None:
        return tuple(program.reshard(*move) for move in moves)
    tensors, result = checked_moves(moves)
    check_way(tensors, mode, in_flight_bytes)
    return _agreed(tensors, result, _Way(True, in_flight_bytes, mode))


def _redistributed(x: GlobalTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> GlobalTensor:
    """Other placements; on the same mesh by its ranks alone, as DTensor does. Differentiable."""
    if mesh != x.device_mesh:
        return reshard(x, mesh, placements)
    placements = checked_move(x, mesh, placements)
    program = captured()
    if program is not None:
        made: GlobalTensor = program.redistribute(x, placements)
        return made
    if not in_order(mesh):
        return reshard(x, mesh, placements)
    way = _Way(False, IN_FLIGHT_BYTES, "broadcast")
    return _apply([x], (Move(0, mesh, placements),), way)[0]


moved_by(_redistributed)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a reshard is made, forward and back. agreed: with all ranks of the program."""

    agreed: bool
    in_flight_bytes: int
    mode: Mode


def _agreed(tensors: Sequence[DTensor], moves: tuple[Move, ...], way: _Way) -> tuple[GlobalTensor, ...]:
    agreement().enter(text_of(tensors, moves, way.mode, way.in_flight_bytes))
    return _apply([as_global(x) for x in tensors], moves, way) if moves else ()


def _apply(tensors: Sequence[GlobalTensor], moves: tuple[Move, ...], way: _Way) -> tuple[GlobalTensor, ...]:
    moved: tuple[GlobalTensor, ...] = _Moves.apply(way, moves, *tensors)  # type: ignore[no-untyped-call]
    return moved


class _Moves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, moves: tuple[Move, ...], *tensors: GlobalTensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.way, ctx.moves = way, moves
        ctx.back = [
            (
                x.device_mesh,
                tuple(Replicate() if p.is_partial() else plain_placement(p) for p in x.placements),
            )
            for x in tensors
        ]
        results = _moved(tensors, moves, way)
        wanting = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(
            *(result for result, move in zip(results, moves) if not wanting[move.tensor])
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: DTensor | None) -> Any:
        """Step 5. Ranks run one backward pass, so they agree on which gradients there are."""
        result = [(move, gradient) for move, gradient in zip(ctx.moves, gradients) if gradient is not None]
        moves = tuple(Move(at, *ctx.back[move.tensor]) for at, (move, _) in enumerate(result))
        there = [gradient for _, gradient in result]
        if not there:
            back: tuple[GlobalTensor, ...] = ()
        elif ctx.way.agreed:
            back = _agreed(there, moves, ctx.way)
        else:
            back = tuple(
                _redistributed(as_global(gradient), move.mesh, move.placements)
                for gradient, move in zip(there, moves)
            )
        sums: list[torch.Tensor | None] = [None] * len(ctx.back)
        for (move, _), part in zip(result, back):
            before = sums[move.tensor]
            sums[move.tensor] = part if before is None else before + part
        return None, None, *sums


def _moved(tensors: Sequence[GlobalTensor], moves: Sequence[Move], way: _Way) -> list[GlobalTensor]:
    """Steps 2 to 4, outside autograd."""
    results = {
        at: _within(tensors[move.tensor], move.mesh, move.placements)
        for at, move in enumerate(moves)
        if _stays(tensors[move.tensor], move)
    }
    going = [at for at in range(len(moves)) if at not in results]
    if going:
        leaving = dict.fromkeys(moves[at].tensor for at in going)
        reduced = {number: _reduced(tensors[number]) for number in leaving}
        arrived = between(reduced, [moves[at] for at in going], way.mode, way.in_flight_bytes)
        results |= dict(zip(going, arrived))
    return [results[at] for at in range(len(moves))]


def _stays(x: GlobalTensor, move: Move) -> bool:
    same = mesh_ranks(x.device_mesh) == mesh_ranks(move.mesh)
    return same and (in_order(move.mesh) or move.placements == x.placements)


def _within(x: GlobalTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> GlobalTensor:
    """Other placements on the tensor's own mesh, or on one that is equal to it."""
    spec = new_spec(mesh, placements, x.shape, x.stride(), x.dtype)
    if is_absent(mesh):
        return global_tensor(nothing(x.dtype, mesh.device_type), spec)
    return global_tensor(part_under(local_of(x), spec_of(x), placements), spec)


def _reduced(x: GlobalTensor) -> GlobalTensor:
    """The tensor as a plan can take it from its mesh: Partial axes reduced, DTensor's inner shards plain."""
    plain = [plain_placement(p) for p in x.placements]
    if in_order(x.device_mesh):
        target = layout_on(x.device_mesh, tuple(plain)).reduced(x.shape).placements
    else:
        target = tuple(Replicate() if p.is_partial() else p for p in plain)  # an all-reduce has no order
    return x if target == x.placements else _within(x, x.device_mesh, target)
