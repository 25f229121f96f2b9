"""A program on several meshes becomes pipeline stages.

    1. The meshes are those of the model's parameters and buffers, all with the same number of ranks, in
       order. Stage k is what is on mesh k; the ranks of a mesh are its tensor-parallel ranks.
    2. While the program is traced, `reshard` moves nothing (`stretto.capturing.mesh_program`). The first time
       that execution goes on at mesh k is the border at which stage k begins.
    3. What is used beyond a border and made before it is a cross-stage edge, as in every captured model.

A program that goes back to a mesh in its forward is refused, and so is one that reshards to a later mesh
before the work of an earlier one has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.capturing.graph import Traced
from stretto.capturing.mesh_program import OnMeshes, check_placement
from stretto.capturing.split import Placement as StagesOfOps
from stretto.capturing.split import place
from stretto.config import ParallelSettings
from stretto.errors import UsageError
from stretto.ir.program import Op
from stretto.passes.layout.program import Origin
from stretto.tensor.clip import mesh_ranks
from stretto.tensor.errors import mesh_name, placements_name


def on_meshes(
    model: nn.Module, parallel: ParallelSettings, tp_plan: Mapping[str, object] | None = None
) -> OnMeshes | None:
    """Step 1; None for a model whose tensors are on no mesh.

    Raises UsageError for a model of which a part is on no mesh, for meshes that are not the plan's stages,
    for placements that no plan has, and for settings that ask for something else.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    tensors |= buffers
    placed = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if not placed:
        return None
    plain = [name for name in tensors if name not in placed]
    if plain:
        raise UsageError(
            f"cannot capture: {plain[0]!r} is on no mesh, and other parameters are: stretto.shard it"
        )
    first: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, tensor in placed.items():
        first.setdefault(mesh_ranks(tensor.device_mesh), (name, tensor.device_mesh))
    _check_meshes(first)
    meshes = [first[ranks][1] for ranks in sorted(first)]
    size = len(min(first))
    _check_settings(parallel, tp_plan, len(meshes), size)
    numbers = {ranks: stage for stage, ranks in enumerate(sorted(first))}
    result = OnMeshes(
        tuple(meshes),
        {name: numbers[mesh_ranks(tensor.device_mesh)] for name, tensor in placed.items()},
        {name: tensor.placements[0] for name, tensor in placed.items()},
    )
    for name, tensor in placed.items():
        _check_tensor(name, tensor, result.placements[name], size, name in buffers)
    return result


def _check_meshes(first: Mapping[tuple[int, ...], tuple[str, DeviceMesh]]) -> None:
    """Raises UsageError where meshes are not the places of a plan. first: ranks of a mesh -> a tensor's name
    on it, and the mesh."""
    for name, mesh in first.values():
        if mesh.ndim != 1:
            raise UsageError(
                f"cannot capture: {name!r} is on a mesh of {mesh.ndim} axes, {mesh_name(mesh)}. "
                "In a captured program a mesh has one axis, whose ranks are tensor parallel"
            )
    sizes = {len(ranks) for ranks in first}
    if len(sizes) > 1:
        few, many = min(first, key=len), max(first, key=len)
        raise UsageError(
            f"cannot capture: {first[few][0]!r} is on a mesh of {len(few)} ranks, {list(few)}, and "
            f"{first[many][0]!r} on one of {len(many)}, {list(many)}. The stages of a plan have equally many "
            "ranks: use meshes of one size, or run the program as it is"
        )
    (size,) = sizes
    wanted = [tuple(range(k * size, (k + 1) * size)) for k in range(len(first))]
    if sorted(first) != wanted:
        raise UsageError(
            f"cannot capture: the model is on meshes of ranks {_lists(sorted(first))}; its "
            f"{len(first)} stages are at ranks {_lists(wanted)}, each mesh in this order"
        )


def _check_settings(
    parallel: ParallelSettings, tp_plan: Mapping[str, object] | None, count: int, size: int
) -> None:
    fits = parallel.pp == count and parallel.tp == size and parallel.dp == 1 and parallel.split == "auto"
    if not fits:
        raise UsageError(
            f"the model is on {count} meshes of {_ranks(size)}, which are its stages: give "
            f"Parallel(pp={count}, tp={size}) with dp=1 and no split, not pp={parallel.pp}, "
            f"tp={parallel.tp}, dp={parallel.dp}, split={parallel.split!r}"
        )
    for what in ("ep", "ampipe_degree", "cp"):
        if getattr(parallel, what) == 1:
            continue
        raise UsageError(
            f"{what} = {getattr(parallel, what)!r} changes a plain model, and this one is on meshes: its own "
            f"program decides what is sharded. Give {what} = 1"
        )
    if parallel.sequence_parallel or parallel.tp_plan is not None or tp_plan is not None:
        what = "sequence_parallel" if parallel.sequence_parallel else "tp_plan"
        raise UsageError(
            f"{what} spreads a plain model, and this one is on meshes: its placements decide. "
            f"Drop {what}, and reshard within the mesh where a tensor should be spread"
        )


def _check_tensor(name: str, tensor: DTensor, placement: Placement, size: int, buffer: bool) -> None:
    kinds = (Replicate,) if buffer else (Replicate, Shard)
    if type(placement) not in kinds:
        what, wanted = ("buffer", "Replicate()") if buffer else ("parameter", "Shard(dim) or Replicate()")
        raise UsageError(
            f"cannot capture: {what} {name!r} lies as {placements_name(tensor.placements)}; in a captured "
            f"program it lies as {wanted}"
        )
    check_placement(f"cannot capture: {name!r} of shape {list(tensor.shape)}", tensor.shape, placement, size)


def place_on_meshes(traced: Traced, on: OnMeshes) -> StagesOfOps:
    """Steps 2 and 3: every op's stage.

    Raises UsageError when execution never reaches a mesh, and when a parameter is used where it is not.
    """
    count = len(on.meshes)
    names = [_mesh(mesh_ranks(mesh)) for mesh in on.meshes]
    never = [k for k in range(1, count) if k not in traced.borders]
    if never:
        name = next(name for name, k in on.places.items() if k == never[0])
        raise UsageError(
            f"the program's forward never reshards a tensor to the {names[never[0]]}, on which "
            f"{name!r} lies. It begins on the {names[0]}, and reaches the others in the order of their ranks"
        )
    cuts = [traced.borders[k] for k in range(1, count)]
    if cuts != sorted(cuts):
        reached = sorted(range(1, count), key=lambda k: traced.borders[k])
        raise UsageError(
            f"the program's forward reaches the meshes of ranks "
            f"{_lists([mesh_ranks(on.meshes[k]) for k in reached])} in this order; stages come one "
            "after another: number ranks so, and reshard a tensor right before the layer that needs it"
        )
    placed = place(_entered(traced, on, cuts), count, cuts, buffers=False)
    for op, origin in traced.program.ops:
        if origin.backward:
            continue
        for name in op.uses:
            kind, _, own = name.partition("/")
            if kind in ("param", "buffer") and (on.places[own],) != tuple(placed[op.name]):
                raise UsageError(
                    f"{own!r} is on the {names[on.places[own]]}, but the forward uses it after it has gone "
                    f"on to the {names[placed[op.name][0]]}. Stages come one after another: reshard a "
                    "tensor right before the layer that needs it, and never back"
                )
    return placed


def _entered(traced: Traced, on: OnMeshes, cuts: Sequence[int]) -> Traced:
    """With the ops that put parts on their meshes, before the forward begins, in the stages of these meshes.
    There are some only where no pass has taken them out."""
    begins = (0, *cuts)

    def origin_of(op: Op, origin: Origin) -> Origin:
        kind, _, own = op.uses[0].partition("/") if op.uses else ("", "", "")
        if origin.segment is not None or origin.backward or kind not in ("param", "buffer"):
            return origin
        return Origin(begins[on.places[own]], False)

    ops = tuple((op, origin_of(op, origin)) for op, origin in traced.program.ops)
    return replace(traced, program=replace(traced.program, ops=ops))


def _ranks(size: int) -> str:
    return f"{size} rank{'s' if size > 1 else ''}"


def _mesh(ranks: tuple[int, ...]) -> str:
    return f"mesh of rank {ranks[0]}" if len(ranks) == 1 else f"mesh of ranks {list(ranks)}"


def _lists(meshes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(ranks)) for ranks in meshes)
