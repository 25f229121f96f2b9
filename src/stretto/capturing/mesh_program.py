"""A program on several meshes while it is traced: one rank's part of all stages, in one process.

1. This process is the first rank of every mesh. Parameters and buffers are tensors on their meshes, made of
   plain parts; the gradient of a part is brought to the parameter's placement.
2. Placements change by `stretto.parallelize.ops`, wherever DTensor or the program changes them, since nothing
   may depend on the rank that captures:

       from         to Replicate       to Shard(d)              to Partial()
       Replicate    -                  own slice                rank 0 keeps it, others have zeros
       Shard(d)     all-gather         all-gather, own slice    all-gather, as Replicate
       Partial()    all-reduce         reduce-scatter           -

   Parts must be equal. DTensor has two inner placements: a shard of a dim that is several in one, and the sum
   of what each rank finds in its rows of a table.
3. A `reshard` to another mesh changes placements to what crosses, goes on at the other mesh (the border), and
   changes placements there. Rank i sends to rank i; the gradient goes the same way back.
4. The loss becomes replicated on the last mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import Placement

from stretto.capturing.calls_adapter import replaced
from stretto.errors import UsageError
from stretto.ir.program import Shard
from stretto.parallelize import ops
from stretto.parallelize.tensor import AXIS, TensorParallel
from stretto.tensor.clip import mesh_ranks
from stretto.tensor.dtensor_adapter import (
    Spec,
    described,
    local_of,
    new_spec,
    outside_modes,
    spec_of,
    unmasked,
)
from stretto.tensor.errors import tensor_name
from stretto.tensor.global_tensor import GlobalTensor, global_tensor
from stretto.tensor.layout import Layout
from stretto.tensor.reshard.arguments import checked_placements
from stretto.tensor.tracing_adapter import (
    capturing,
    keep_elsewhere,
    redistributing,
    split_factor,
    standing_first,
    table_rows,
)

REDUCTIONS = {"sum": "sum", "avg": "sum", "max": "max", "min": "max"}
"""Reduction of a Partial -> that of the all-reduce: an average is divided after it, a minimum negated."""


@dataclass(frozen=True, slots=True)
class OnMeshes:
    """Where a model lies. meshes: of each stage, all of one size; places, placements: parameter or buffer
    name -> its stage, and how it is placed on that stage's mesh."""

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
            ranks = mesh_ranks(mesh)
        for stage, own in enumerate(self.meshes):
            if mesh_ranks(own) == ranks:
                return stage
        raise UsageError(
            f"the captured program reshards to a mesh of ranks {list(ranks)}, on which no parameter "
            "lies: stages are the meshes of parameters"
        )

    def tensor_parallel(self, model: nn.Module) -> TensorParallel | None:
        """What is sharded along the axis tp; None for meshes of one rank."""
        if self.size == 1:
            return None
        shards = {
            name: Shard(AXIS, placement.dim)  # type: ignore[attr-defined]
            for name, _ in model.named_parameters(remove_duplicate=False)
            if not (placement := self.placements[name]).is_replicate()
        }
        return TensorParallel(self.size, shards)


class MeshProgram:
    """In the place of `stretto.shard`, `reshard` and `local` while the program is traced.

    border: takes the stage at which execution goes on.
    """

    def __init__(self, on: OnMeshes, border: Callable[[int], None]) -> None:
        self._on = on
        self._border = border

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Steps 1 and 2, while the context lasts."""
        with standing_first(self._on.meshes), redistributing(redistributed), capturing(self):
            yield

    def state(self, model: nn.Module) -> AbstractContextManager[None]:
        """Step 1: while the context lasts, the model's plain parts are tensors on meshes."""
        return replaced(model, self._from_part)

    def _from_part(self, name: str, part: Tensor) -> Tensor:
        mesh, placement = self._on.meshes[self._on.places[name]], self._on.placements[name]
        shape = list(part.shape)
        stride: Sequence[int] = part.stride()
        if not placement.is_replicate() and self._on.size > 1:
            shape[placement.dim] *= self._on.size  # type: ignore[attr-defined]
            stride = torch.empty(shape, device="meta").stride()
        spec = new_spec(mesh, (placement,), shape, stride, part.dtype)
        return _entered(part, spec)

    def loss(self, loss: Tensor) -> Tensor:
        """Step 4; a plain loss stays what it is."""
        return self.local(self.redistribute(loss, (Replicate(),))) if isinstance(loss, DTensor) else loss

    # What the program calls.

    def shard(self, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> GlobalTensor:
        """A plain tensor, which all ranks have, as one on a mesh."""
        own = self._on.meshes[self._on.place(mesh)]
        wanted = [Replicate()] if placements is None else placements
        wanted = checked_placements(f"shard of {tensor_name(tensor)}", tuple(tensor.shape), mesh, wanted)
        full = new_spec(own, (Replicate(),), tensor.shape, tensor.stride(), tensor.dtype)
        return self.redistribute(_entered(tensor, full), wanted)

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
        crossing = message(old, new, x.shape, self._on.size)
        left = _moved(x, crossing)
        self._border(stage)
        return _arrived(left, own, new, _full(old))

    def redistribute(self, x: DTensor, placements: Sequence[Placement]) -> GlobalTensor:
        """Other placements on the tensor's own mesh."""
        (new,) = placements
        return _moved(x, new)

    def local(self, x: Tensor) -> Tensor:
        """This rank's part; a plain tensor is full on every rank."""
        return x.to_local() if isinstance(x, DTensor) else x


def _full(placement: Placement) -> Placement:
    """The placement of a tensor's gradient: a partial sum's is that of the sum."""
    return Replicate() if placement.is_partial() else placement


def _on(spec: Spec, placement: Placement, mesh: DeviceMesh | None = None) -> Spec:
    meta = spec.tensor_meta
    assert meta is not None, "it is the description of a tensor"
    return new_spec(spec.mesh if mesh is None else mesh, (placement,), meta.shape, meta.stride, meta.dtype)


def _placed(x: DTensor, placement: Placement) -> GlobalTensor:
    spec = _on(spec_of(x), placement)
    return global_tensor(redistributed(local_of(x), spec_of(x), spec), spec)


class _TwoWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Any], Any], back: Callable[[Any], Any]) -> GlobalTensor:
        ctx.set_materialize_grads(False)
        ctx.back = back
        result: GlobalTensor = there(x)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        return None if gradient is None else ctx.back(gradient), None, None


def _both_ways(x: Tensor, there: Callable[[Any], Any], back: Callable[[Any], Any]) -> GlobalTensor:
    made: GlobalTensor = _TwoWays.apply(x, there, back)  # type: ignore[no-untyped-call]
    return made


def _entered(part: Tensor, spec: Spec) -> GlobalTensor:
    (placement,) = spec.placements
    return _both_ways(
        part,
        lambda part: global_tensor(part.detach(), spec),
        lambda gradient: local_of(_placed(gradient, placement)),
    )


def _moved(x: DTensor, placement: Placement) -> GlobalTensor:
    (old,) = x.placements

    def there(x: DTensor) -> GlobalTensor:
        result = _placed(x, placement)
        # Detached for the mark: a backward op is in the stage of the forward op that it derives.
        return global_tensor(local_of(result).detach(), spec_of(result))

    return _both_ways(x, there, lambda gradient: _placed(gradient, _full(old)))


def _arrived(x: GlobalTensor, mesh: DeviceMesh, placement: Placement, home: Placement) -> GlobalTensor:
    """What has crossed, on the other mesh. home: the placement that the gradient has when it is back."""
    first = x.device_mesh

    def there(x: GlobalTensor) -> GlobalTensor:
        (crossed,) = x.placements
        return _placed(global_tensor(local_of(x).detach(), _on(spec_of(x), crossed, mesh)), placement)

    def back(gradient: DTensor) -> GlobalTensor:
        (now,) = gradient.placements
        crossing = message(now, home, gradient.shape, gradient.device_mesh.size())
        leaving = _placed(gradient, crossing)
        return global_tensor(local_of(leaving), _on(spec_of(leaving), crossing, first))

    return _both_ways(x, there, back)


# --- step 2: other placements on one mesh ------------------------------------------------------------------


def redistributed(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """A rank's part of a tensor under other placements of its mesh. Not differentiable.

    local: the part under `source`. Raises UsageError for parts that differ in size, and for placements that
    are neither Shard, Replicate nor Partial.
    """
    (old,), (new,) = source.placements, target.placements
    size: int = source.mesh.size()
    if old == new or size == 1:
        return local
    shape, _ = described(source)
    for placement in (old, new):
        check_placement(f"a tensor of shape {list(shape)}", shape, placement, size)
    if table_rows(new) is not None:
        return _own_rows(local, new, size)
    local, source = unmasked(local, source)
    (old,) = source.placements
    if old.is_partial() and is_shard(new) and REDUCTIONS[_reduction(old)] == "sum":
        result = _by_blocks(ops.reduce_scatter, local, new, size)
        return result / size if _reduction(old) == "avg" else result
    if old.is_partial():
        local = _reduced(local, _reduction(old), size)
    elif is_shard(old):
        local = _by_blocks(ops.all_gather, local, old, size)
    if is_shard(new):
        return _own_part(local, new, size)
    if new.is_partial() and _reduction(new) == "sum":
        return torch.where(ops.index(local, AXIS, size) == 0, local, torch.zeros_like(local))
    return local


def message(old: Placement, new: Placement, shape: Sequence[int], size: int) -> Placement:
    """As what a tensor goes from one mesh to another of its size, for each byte to cross once if it can.

    What is smaller goes: a shard that is gathered where it arrives, and one that was cut before it left. A
    sum is taken before, to shards where a dim has equal parts for all.
    """
    if old.is_partial() and not is_shard(new):
        (result,) = Layout(tuple(range(size)), (Partial(),)).reduced(shape).placements
        assert isinstance(result, (ShardOf, Replicate))
        equal = isinstance(result, ShardOf) and shape[result.dim] % size == 0
        return result if equal else Replicate()
    if is_shard(new):
        return new
    return old


def is_shard(placement: Placement) -> bool:
    """Whether each rank has a part: Shard, or DTensor's inner kind of it."""
    return not placement.is_partial() and not placement.is_replicate()


def check_placement(what: str, shape: Sequence[int], placement: Placement, size: int) -> None:
    """Raises UsageError if one program cannot have it. what: the tensor, in the message."""
    if is_shard(placement):
        dim: int = placement.dim  # type: ignore[attr-defined]
        blocks = split_factor(placement)
        if shape[dim] % (size * blocks):
            raise UsageError(
                f"{what} cannot be sharded equally over {AXIS} = {size} along dim {dim}: {shape[dim]} is not "
                f"a multiple of {size * blocks}. A captured program has parts of one size on all ranks: pad "
                "the dim, or place the tensor otherwise"
            )
        return
    plain = type(placement) is Partial or table_rows(placement) is not None
    if placement.is_partial() and not (plain and _reduction(placement) in REDUCTIONS):
        raise UsageError(
            f"{what} would become {placement!r}, which a captured program does not have: reshard it to "
            "[Replicate()] before the op"
        )


def _own_rows(indices: Tensor, new: Placement, size: int) -> Tensor:
    """Indices into a table of which each rank has equally many rows, as indices into this rank's."""
    total = table_rows(new)
    assert total is not None, "it is asked where it is one"
    assert total % size == 0, "the table is a parameter, and has equal parts"
    here = indices - ops.index(indices, AXIS, size) * (total // size)
    elsewhere = (here < 0) | (here >= total // size)
    keep_elsewhere(new, elsewhere)
    return here.masked_fill(elsewhere, 0)


def _reduction(placement: Placement) -> str:
    result: str = placement.reduce_op  # type: ignore[attr-defined]
    return result


def _reduced(local: Tensor, reduction: str, size: int) -> Tensor:
    if reduction == "min":
        return -ops.all_reduce(-local, AXIS, size, "max")
    result = ops.all_reduce(local, AXIS, size, REDUCTIONS[reduction])
    return result / size if reduction == "avg" else result


def _own_part(full: Tensor, new: Placement, size: int) -> Tensor:
    return _by_blocks(lambda *given: ops.own_chunk(*given).contiguous(), full, new, size)


def _by_blocks(change: Callable[..., Tensor], x: Tensor, placement: Placement, size: int) -> Tensor:
    """A change of the sharded dim, of which each rank has a part in each of its blocks."""
    dim: int = placement.dim  # type: ignore[attr-defined]
    count = split_factor(placement)
    if count == 1:
        return change(x, dim, AXIS, size)
    blocks = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    return change(blocks, dim + 1, AXIS, size).flatten(dim, dim + 1)
