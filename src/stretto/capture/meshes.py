"""A program on several meshes becomes pipeline stages: each mesh is a stage's place.

    1. The meshes are those of the model's parameters and buffers; ranks 0, 1, ... have one each, and stage
       k is what lies on the mesh of rank k.
    2. While the program is traced, `reshard` moves nothing: it says that execution goes on at another mesh.
       The first time that it goes on at mesh k is the border at which stage k begins.
    3. What is used beyond a border and made before it is a cross-stage edge, as in every captured model: a
       reshard to the next mesh, a skip over several, and the gradients' ways back.

Stages come one after another, so a program that goes back to a mesh in its forward is refused, and so is one
that reshards to a later mesh before the work of an earlier one has ended. What has no parameters is computed
where execution is, which is where its tensors are in such a program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from stretto.capture.split import Placement, place
from stretto.capture.trace import Traced
from stretto.config import ParallelSettings
from stretto.errors import UsageError
from stretto.tensor.clip import layout_on
from stretto.tensor.global_tensor import GlobalTensor


@dataclass(frozen=True, slots=True)
class OnMeshes:
    """Step 1. ranks: how many meshes; places: parameter or buffer name -> the rank of its mesh."""

    ranks: int
    places: Mapping[str, int]

    def place(self, mesh: DeviceMesh) -> int:
        """The rank of a mesh to which the program reshards. Raises UsageError for a mesh of no parameter."""
        found = ranks_of(mesh)
        if len(found) != 1 or not 0 <= found[0] < self.ranks:
            raise UsageError(
                f"the captured program reshards to a mesh of ranks {list(found)}, on which no parameter "
                "lies: stages are the meshes of parameters, with one rank each"
            )
        return found[0]


def on_meshes(model: nn.Module, parallel: ParallelSettings) -> OnMeshes | None:
    """Step 1; None for a model whose tensors are on no mesh.

    Raises UsageError for a model of which a part is on no mesh, for meshes of more than one rank or of other
    ranks than 0 to their number, and for settings that ask for something else.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    places: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, GlobalTensor):
            continue
        ranks = ranks_of(tensor.device_mesh)
        if len(ranks) != 1:
            raise UsageError(
                f"cannot capture: {name!r} is on a mesh of {len(ranks)} ranks, {list(ranks)}, and a captured "
                f"program has one rank on each mesh. Capture the plain model with "
                f"Parallel(pp=..., tp={len(ranks)}), or run the program as it is"
            )
        places[name] = ranks[0]
    if not places:
        return None
    plain = [name for name in tensors if name not in places]
    if plain:
        raise UsageError(
            f"cannot capture: {plain[0]!r} is on no mesh, and other parameters are: stretto.shard it"
        )
    count = len(set(places.values()))
    if set(places.values()) != set(range(count)):
        raise UsageError(
            f"cannot capture: the model is on meshes of ranks {sorted(set(places.values()))}; stages are "
            f"ranks 0 to {count - 1}"
        )
    if parallel.pp != count or parallel.tp != 1 or parallel.split != "auto":
        raise UsageError(
            f"the model is on {count} meshes, which are its stages: give Parallel(pp={count}) "
            f"with tp=1 and no split, not pp={parallel.pp}, tp={parallel.tp}, split={parallel.split!r}"
        )
    return OnMeshes(count, places)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """All ranks of a mesh."""
    return tuple(layout_on(mesh, (Replicate(),) * mesh.ndim).ranks)


def place_on_meshes(traced: Traced, meshes: OnMeshes) -> Placement:
    """Steps 2 and 3: every op's stage.

    Raises UsageError when execution never reaches a mesh, and when a parameter is used where it is not.
    """
    never = [k for k in range(1, meshes.ranks) if k not in traced.borders]
    if never:
        name = next(name for name, k in meshes.places.items() if k == never[0])
        raise UsageError(
            f"the program's forward never reshards a tensor to the mesh of rank {never[0]}, on which "
            f"{name!r} lies. It begins on that of rank 0, and reaches the others in the order of their ranks"
        )
    cuts = [traced.borders[k] for k in range(1, meshes.ranks)]
    if cuts != sorted(cuts):
        reached = sorted(range(1, meshes.ranks), key=lambda k: traced.borders[k])
        raise UsageError(
            f"the program's forward reaches the meshes of ranks {reached} in this order; stages come one "
            "after another: number ranks so, and reshard a tensor right before the layer that needs it"
        )
    placed = place(traced, meshes.ranks, cuts, buffers=False)
    for item in traced.ops:
        if item.backward:
            continue
        for name in item.op.uses:
            kind, _, own = name.partition("/")
            if kind in ("param", "buffer") and (meshes.places[own],) != tuple(placed[item.op.name]):
                raise UsageError(
                    f"{own!r} is on the mesh of rank {meshes.places[own]}, but the forward uses it after it "
                    f"has gone on to the mesh of rank {placed[item.op.name][0]}. Stages come one after "
                    "another: reshard a tensor right before the layer that needs it, and never back"
                )
    return placed
