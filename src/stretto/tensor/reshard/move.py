"""`reshard`: one tensor to other placements, or to another mesh, forward and backward.

1. All ranks agree that they make the same reshard                         agree
2. On one mesh: DTensor's collectives, where they are right                within
3. Else: Partial axes are reduced on the source mesh, to distinct tiles
   where dims allow; transfers are planned, on every rank alike; and
   carried out by the ranks of either mesh                                 plan, execute
4. Ranks off the target mesh have the description alone                    clip
5. The gradient is a tensor on the target mesh; it goes the way back: a
   reshard to the source's mesh and placements. A Partial source has a
   whole gradient, as in DTensor.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.errors import UsageError
from stretto.tensor import errors
from stretto.tensor.captured import captured
from stretto.tensor.clip import in_order, is_absent, layout_on, mesh_ranks, nothing
from stretto.tensor.dtensor_adapter import local_of, new_spec, plain_placement, spec_of, wrapped
from stretto.tensor.global_tensor import GlobalTensor, as_global, global_tensor
from stretto.tensor.layout import Layout, region_shape, sharded_dim
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.execute import execute, part_of
from stretto.tensor.reshard.lines import lines
from stretto.tensor.reshard.plan import Hosts, Mode, ReshardPlan, plan_reshard
from stretto.tensor.reshard.within import redistributed_part

IN_FLIGHT_BYTES = 256 << 20
"""How much may wait to be sent, and to be received, on a rank unless told otherwise. Assumed: small beside an
accelerator's memory, and many pieces."""

MODES: tuple[Mode, ...] = ("broadcast", "all_gather", "point_to_point")


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
    mode: how a box goes to several ranks; see `stretto.tensor.reshard.plan`.

    No rank holds more of the tensor than its parts, and pieces under way. Returns when this rank's part is
    there. Raises UsageError for arguments that do not fit, RunError if ranks do not make the same reshard or
    one is lost.
    """
    program = captured()
    if program is not None:
        resharded: GlobalTensor = program.reshard(x, mesh, placements)
        return resharded
    placements = _checked(x, mesh, placements, in_flight_bytes, mode)
    agreement().enter(_text(x, mesh, placements, in_flight_bytes, mode))
    return _apply(as_global(x), mesh, placements, _Way(True, in_flight_bytes, mode, False))


def redistributed(x: GlobalTensor, placements: Sequence[Placement], async_op: bool) -> GlobalTensor:
    """Other placements on the same mesh, by the ranks of the mesh alone, as DTensor does. Differentiable."""
    placements = _checked(x, x.device_mesh, placements, IN_FLIGHT_BYTES, "broadcast")
    program = captured()
    if program is not None:
        made: GlobalTensor = program.redistribute(x, placements)
        return made
    if not in_order(x.device_mesh):
        return reshard(x, x.device_mesh, placements)
    return _apply(x, x.device_mesh, placements, _Way(False, IN_FLIGHT_BYTES, "broadcast", async_op))


class _Way:
    """How a reshard is made, forward and back. agreed: with all ranks of the program."""

    def __init__(self, agreed: bool, in_flight_bytes: int, mode: Mode, async_op: bool) -> None:
        self.agreed = agreed
        self.in_flight_bytes = in_flight_bytes
        self.mode = mode
        self.async_op = async_op


def _apply(x: GlobalTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], way: _Way) -> GlobalTensor:
    moved: GlobalTensor = _Move.apply(x, mesh, placements, way)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: GlobalTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], way: _Way
    ) -> GlobalTensor:
        ctx.set_materialize_grads(False)
        ctx.way = way
        ctx.back = (x.device_mesh, tuple(Replicate() if p.is_partial() else p for p in x.placements))
        return _moved(x, mesh, placements, way)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        mesh, placements = ctx.back
        way = ctx.way
        if way.agreed:
            back = reshard(gradient, mesh, placements, in_flight_bytes=way.in_flight_bytes, mode=way.mode)
        else:
            back = redistributed(as_global(gradient), placements, way.async_op)
        return back, None, None, None


def _moved(x: GlobalTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], way: _Way) -> GlobalTensor:
    same = mesh_ranks(x.device_mesh) == mesh_ranks(mesh)
    if same and (in_order(mesh) or placements == x.placements):
        spec = new_spec(mesh, placements, x.shape, x.stride(), x.dtype)
        if is_absent(mesh):
            return global_tensor(nothing(x.dtype, mesh.device_type), spec)
        return global_tensor(redistributed_part(_bare(x), placements, dist.get_rank(), way.async_op), spec)
    return _between(_reduced(x), mesh, placements, way)


def _reduced(x: GlobalTensor) -> GlobalTensor:
    """The tensor as a plan can take it from its mesh: Partial axes reduced, DTensor's inner shards plain."""
    plain = [plain_placement(p) for p in x.placements]
    if in_order(x.device_mesh):
        target = layout_on(x.device_mesh, tuple(plain)).reduced(x.shape).placements
    else:
        target = tuple(Replicate() if p.is_partial() else p for p in plain)  # an all-reduce has no order
    if target == x.placements:
        return x
    spec = new_spec(x.device_mesh, target, x.shape, x.stride(), x.dtype)
    if is_absent(x.device_mesh):
        return global_tensor(local_of(x), spec)
    return global_tensor(redistributed_part(_bare(x), target, dist.get_rank()), spec)


def _between(x: GlobalTensor, mesh: DeviceMesh, placements: tuple[Placement, ...], way: _Way) -> GlobalTensor:
    rank = dist.get_rank()
    shape = tuple(x.shape)
    source = layout_on(x.device_mesh, x.placements)
    target = layout_on(mesh, placements)
    region = target.region(shape, rank)
    spec = new_spec(mesh, placements, shape, _strides(shape), x.dtype)
    if region is None:
        local = nothing(x.dtype, mesh.device_type)
    elif rank in target.zero_ranks():
        local = torch.zeros(region_shape(region), dtype=x.dtype, device=mesh.device_type)
    else:
        local = torch.empty(region_shape(region), dtype=x.dtype, device=mesh.device_type)
    group = lines().group(mesh.device_type, sorted({*source.ranks, *target.ranks}))
    if region is not None or not is_absent(x.device_mesh):
        plan = _plan(shape, x.element_size(), source, target, way.mode)
        execute(
            plan,
            part_of(source, shape, rank, local_of(x)),
            part_of(target, shape, rank, local),
            lines(),
            group,
            way.in_flight_bytes,
        )
    return global_tensor(local, spec)


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], itemsize_bytes: int, source: Layout, target: Layout, mode: Mode
) -> ReshardPlan:
    return plan_reshard(shape, itemsize_bytes, source, target, _hosts(), mode)


def _hosts() -> Hosts:
    """Hosts as torchrun fills them; one for each rank where the launcher does not say."""
    world = dist.get_world_size()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Hosts.of(devices if devices > 0 and world % devices == 0 else 1, world)


def _bare(x: GlobalTensor) -> DTensor:
    return wrapped(DTensor, local_of(x), spec_of(x))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _text(
    x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], in_flight_bytes: int, mode: Mode
) -> str:
    """What ranks compare. Everything that their messages depend on."""
    return (
        f"of {errors.tensor_name(x)} to {errors.placements_name(placements)} on mesh "
        f"{errors.mesh_name(mesh)} ({mode}, in_flight_bytes={in_flight_bytes})"
    )


def _checked(
    x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], in_flight_bytes: int, mode: Mode
) -> tuple[Placement, ...]:
    """Placements with dims from 0. Raises UsageError if an argument does not fit."""
    if not isinstance(x, DTensor):
        raise errors.not_distributed("reshard", x)
    where = f"reshard of {errors.tensor_name(x)}"
    found = checked_placements(where, tuple(x.shape), mesh, placements)
    if mesh.device_type != x.device_mesh.device_type:
        raise UsageError(
            f"{where}: to mesh {errors.mesh_name(mesh)} of device type {mesh.device_type!r}, from "
            f"{x.device_mesh.device_type!r}; both meshes must have one device type"
        )
    if mode not in MODES:
        raise UsageError(f"{where}: mode={mode!r}; it is one of {', '.join(MODES)}")
    if not isinstance(in_flight_bytes, int) or in_flight_bytes < 1:
        raise UsageError(f"{where}: in_flight_bytes={in_flight_bytes!r}; give a number of bytes, above 0")
    return found


def checked_placements(
    where: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    """Placements of a tensor on a mesh, their dims from 0. Raises UsageError if they do not fit it.

    where: how the message begins. shape: of the whole tensor.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(
            f"{where}: the mesh is a {type(mesh).__name__}, {mesh!r}; give a "
            "torch.distributed.device_mesh.DeviceMesh"
        )
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
