"""A program on several meshes while it is traced: one rank's part of all stages, in one process.

1. This process stands at the first place of every mesh, so that all stages compute here, on the part of
   tensor-parallel rank 0. Parameters and buffers are tensors on their meshes, made of plain parts; the
   gradient of a part is brought to the parameter's placement.
2. Placements change with collectives of the axis tp (`stretto.capture.redistribute`), wherever DTensor or
   the program changes them.
3. A `reshard` to another mesh is three things: placements change on the first mesh to what crosses; the
   border, at which execution goes on at the other; placements change there to what is wanted. Rank i of
   the one mesh sends to rank i of the other, and the gradient goes the same way back.
4. The loss becomes whole on every rank of the last mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from stretto.capture.redistribute import check_placement, message, redistributed
from stretto.errors import UsageError
from stretto.ir.program import Shard
from stretto.parallelize.tensor import AXIS, TensorParallel
from stretto.tensor.captured import capturing
from stretto.tensor.clip import layout_on
from stretto.tensor.dtensor_adapter import Spec, local_of, new_spec, outside_modes, spec_of
from stretto.tensor.errors import tensor_name
from stretto.tensor.global_tensor import GlobalTensor, global_tensor
from stretto.tensor.reshard.arguments import checked_placements
from stretto.tensor.tracing_adapter import redistributing, standing_first


@dataclass(frozen=True, slots=True)
class OnMeshes:
    """Where a model lies. meshes: of each stage, all of one size; places, placements: parameter or buffer
    name -> its stage, and how it lies on that stage's mesh."""

    meshes: tuple[DeviceMesh, ...]
    places: Mapping[str, int]
    placements: Mapping[str, Placement]

    @property
    def size(self) -> int:
        """Ranks of each mesh."""
        return int(self.meshes[0].size())

    def place(self, mesh: DeviceMesh) -> int:
        """The stage of a mesh to which the program reshards. Raises UsageError for a mesh of no parameter."""
        with outside_modes():
            ranks = ranks_of(mesh)
        for stage, own in enumerate(self.meshes):
            if ranks_of(own) == ranks:
                return stage
        raise UsageError(
            f"the captured program reshards to a mesh of ranks {list(ranks)}, on which no parameter "
            "lies: stages are the meshes of parameters"
        )

    def tensor_parallel(self, model: nn.Module) -> TensorParallel | None:
        """What is spread along the axis tp; None for meshes of one rank."""
        if self.size == 1:
            return None
        shards = {
            name: Shard(AXIS, placement.dim)  # type: ignore[attr-defined]
            for name, _ in model.named_parameters(remove_duplicate=False)
            if not (placement := self.placements[name]).is_replicate()
        }
        return TensorParallel(self.size, {}, shards)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """All ranks of a mesh."""
    return tuple(layout_on(mesh, (Replicate(),) * mesh.ndim).ranks)


class MeshProgram:
    """What stands for `stretto.shard`, `reshard` and `local` while the program is traced.

    border: is told the stage at which execution goes on.
    """

    def __init__(self, on: OnMeshes, border: Callable[[int], None]) -> None:
        self._on = on
        self._border = border

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Steps 1 and 2, while the context lasts."""
        with standing_first(self._on.meshes), redistributing(redistributed), capturing(self):
            yield

    @contextmanager
    def state(self, model: nn.Module) -> Iterator[None]:
        """Step 1: while the context lasts, the model's plain parts are tensors on meshes."""
        made: dict[int, Tensor] = {}
        kept: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for prefix, module in model.named_modules():
                for table in (module._parameters, module._buffers):
                    for name, part in list(table.items()):
                        if part is None:
                            continue
                        kept.append((table, name, part))
                        if id(part) not in made:
                            made[id(part)] = self._from_part(f"{prefix}.{name}" if prefix else name, part)
                        table[name] = made[id(part)]
            yield
        finally:
            for held, name, part in kept:
                held[name] = part

    def _from_part(self, name: str, part: Tensor) -> Tensor:
        mesh, placement = self._on.meshes[self._on.places[name]], self._on.placements[name]
        shape = list(part.shape)
        stride: Sequence[int] = part.stride()
        if not placement.is_replicate() and self._on.size > 1:
            shape[placement.dim] *= self._on.size  # type: ignore[attr-defined]
            stride = torch.empty(shape, device="meta").stride()
        spec = new_spec(mesh, (placement,), shape, stride, part.dtype)
        made: Tensor = _Enter.apply(part, spec)  # type: ignore[no-untyped-call]
        return made

    def loss(self, loss: Tensor) -> Tensor:
        """Step 4; a plain loss stays what it is."""
        return self.local(self.redistribute(loss, (Replicate(),))) if isinstance(loss, DTensor) else loss

    # What the program calls.

    def shard(self, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> GlobalTensor:
        """A plain tensor, which all ranks have, as one on a mesh."""
        if isinstance(tensor, DTensor):
            raise UsageError(
                f"shard of {tensor_name(tensor)}: it is on a mesh already; use stretto.reshard(x, mesh, "
                "placements)"
            )
        own = self._on.meshes[self._on.place(mesh)]
        wanted = [Replicate()] if placements is None else placements
        wanted = checked_placements(f"shard of {tensor_name(tensor)}", tuple(tensor.shape), mesh, wanted)
        whole = new_spec(own, (Replicate(),), tensor.shape, tensor.stride(), tensor.dtype)
        made: GlobalTensor = _Enter.apply(tensor, whole)  # type: ignore[no-untyped-call]
        return self.redistribute(made, wanted)

    def reshard(self, x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> GlobalTensor:
        """Step 3."""
        stage = self._on.place(mesh)
        own = self._on.meshes[stage]
        if not isinstance(x, DTensor):
            self._border(stage)
            return self.shard(x, mesh, placements)
        (new,) = checked_placements(f"reshard of {tensor_name(x)}", tuple(x.shape), mesh, placements)
        if own == x.device_mesh:
            return self.redistribute(x, (new,))
        (old,) = x.placements
        for placement in (old, new):
            check_placement(tensor_name(x), x.shape, placement, self._on.size)
        crossing = message(old, new, x.shape, self._on.size)
        left: GlobalTensor = _Leave.apply(x, crossing)  # type: ignore[no-untyped-call]
        self._border(stage)
        arrived: GlobalTensor = _Arrive.apply(left, own, new, _whole(old))  # type: ignore[no-untyped-call]
        return arrived

    def redistribute(self, x: DTensor, placements: Sequence[Placement]) -> GlobalTensor:
        """Other placements on the tensor's own mesh."""
        (new,) = placements
        check_placement(tensor_name(x), x.shape, new, self._on.size)
        made: GlobalTensor = _Leave.apply(x, new)  # type: ignore[no-untyped-call]
        return made

    def local(self, x: Tensor) -> Tensor:
        """This rank's part; a plain tensor is whole on every rank."""
        return x.to_local() if isinstance(x, DTensor) else x


def _whole(placement: Placement) -> Placement:
    """The placement of a tensor's gradient: an addend's is that of the sum."""
    return Replicate() if placement.is_partial() else placement


def _on(spec: Spec, placement: Placement, mesh: DeviceMesh | None = None) -> Spec:
    """The same tensor, placed otherwise."""
    meta = spec.tensor_meta
    assert meta is not None, "it is the description of a tensor"
    return new_spec(spec.mesh if mesh is None else mesh, (placement,), meta.shape, meta.stride, meta.dtype)


def _placed(x: DTensor, placement: Placement) -> GlobalTensor:
    spec = _on(spec_of(x), placement)
    return global_tensor(redistributed(local_of(x), spec_of(x), spec), spec)


class _Enter(torch.autograd.Function):
    """A plain part as a tensor on a mesh."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, spec: Spec) -> GlobalTensor:
        ctx.set_materialize_grads(False)
        (ctx.placement,) = spec.placements
        return global_tensor(part.detach(), spec)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        return None if gradient is None else local_of(_placed(gradient, ctx.placement)), None


class _Leave(torch.autograd.Function):
    """Another placement on the same mesh; the gradient goes back to the one before.

    The detached alias is there for its mark: a backward op is in the stage of the forward op that it derives.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, placement: Placement) -> GlobalTensor:
        ctx.set_materialize_grads(False)
        (old,) = x.placements
        ctx.back = _whole(old)
        found = _placed(x, placement)
        return global_tensor(local_of(found).detach(), spec_of(found))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        return None if gradient is None else _placed(gradient, ctx.back), None


class _Arrive(torch.autograd.Function):
    """What has crossed, on the other mesh. home: the placement that the gradient has when it is back."""

    @staticmethod
    def forward(
        ctx: Any, x: GlobalTensor, mesh: DeviceMesh, placement: Placement, home: Placement
    ) -> GlobalTensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.home = x.device_mesh, home
        (crossed,) = x.placements
        here = global_tensor(local_of(x).detach(), _on(spec_of(x), crossed, mesh))
        return _placed(here, placement)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        (held,) = gradient.placements
        crossing = message(held, ctx.home, gradient.shape, gradient.device_mesh.size())
        leaving = _placed(gradient, crossing)
        back = global_tensor(local_of(leaving), _on(spec_of(leaving), crossing, ctx.mesh))
        return back, None, None, None
