"""The global view: PyTorch's DTensor, and what it lacks where tensors lie on several meshes.

`GlobalTensor` is DTensor with one thing put before every op. What forced it, all with PyTorch 2.13:

* a rank off the mesh computes on empty parts, or fails (see `stretto.tensor.clip`);
* `redistribute` to another mesh raises nothing and moves nothing: here it is `stretto.reshard`;
* a plain tensor beside a distributed one is refused: here it counts as replicated, unless that is ambiguous;
* the gradient of a mean loss over a sharded tensor is too large (`stretto.tensor.mean_losses`);
* two meshes in one op, shapes that depend on data, `item` off the mesh: the errors, where there are any, name
  neither the ranks of the meshes nor what to do, and some come on some ranks only.

On the mesh an op is handed on to DTensor as it is; sharding rules, module styles and checkpoints are
PyTorch's. A plain DTensor that meets a `GlobalTensor` in an op joins: the result is a `GlobalTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.tensor import errors
from stretto.tensor.clip import absent_call, in_order, is_absent, layout_on, nothing
from stretto.tensor.dtensor_adapter import (
    Spec,
    local_of,
    needs_redistribution,
    new_spec,
    set_spec,
    spec_of,
    wrapped,
    written_args,
)
from stretto.tensor.layout import region_shape
from stretto.tensor.mean_losses import over_the_whole

aten = torch.ops.aten


class GlobalTensor(DTensor):
    """One tensor as all ranks see it: whole shape, dtype, device, mesh and placements, on every rank.

    Ranks of its mesh hold parts of it; the others hold nothing, and compute nothing. Made by
    `stretto.shard` and `stretto.reshard`, and by every op on such tensors.
    """

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = _tensors(args, kwargs)
        mesh = _one_mesh(op, leaves)
        _refuse_shapes_from_data(op, args, leaves)
        if not all(isinstance(leaf, DTensor) for leaf in leaves):
            beside = next(leaf for leaf in leaves if isinstance(leaf, DTensor))
            _refuse_writes_to_plain(op, args, kwargs, beside)
            args = tuple(_placed(op, value, beside) for value in args)
            kwargs = {name: _placed(op, value, beside) for name, value in kwargs.items()}
        args = over_the_whole(op, args)
        if not in_order(mesh) and needs_redistribution(op, args, kwargs):
            raise errors.ranks_out_of_order(op, leaves)
        if is_absent(mesh) and op is not aten.equal.default:
            if op is aten._local_scalar_dense.default:
                raise errors.value_off_mesh(op, args[0], dist.get_rank())
            return absent_call(op, args, kwargs, global_tensor)
        return _present_call(op, args, kwargs)

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor:
        """DTensor's `redistribute`, for module styles; to another mesh it is `stretto.reshard`.

        async_op: the result's part may still be under way; the first op on it waits.
        """
        from stretto.tensor.reshard.move import redistributed, reshard

        mesh = self.device_mesh if device_mesh is None else device_mesh
        placements = [Replicate()] * mesh.ndim if placements is None else placements
        if mesh == self.device_mesh:
            return redistributed(self, placements, async_op)
        return reshard(self, mesh, placements)

    def to_local(self, **options: Any) -> torch.Tensor:
        """This rank's part. Raises UsageError on a rank off the mesh; `stretto.local` gives None there."""
        if is_absent(self.device_mesh):
            raise errors.part_off_mesh(self, dist.get_rank(), "to_local")
        return DTensor.to_local(self, **options)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """The whole tensor. Raises UsageError on a rank off the mesh; `stretto.reshard` brings it there."""
        if is_absent(self.device_mesh):
            raise errors.part_off_mesh(self, dist.get_rank(), "full_tensor")
        return DTensor.full_tensor(self, **options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = "not on this rank" if is_absent(self.device_mesh) else f"this rank's part: {local_of(self)}"
        return f"GlobalTensor({errors.tensor_name(self)}; {held})"


def global_tensor(local: torch.Tensor, spec: Spec) -> GlobalTensor:
    """A `GlobalTensor` from this rank's part and the description, outside autograd."""
    return wrapped(GlobalTensor, local, spec)


def as_global(x: DTensor) -> GlobalTensor:
    """A DTensor made elsewhere, as a `GlobalTensor` that shares its part; differentiable."""
    if isinstance(x, GlobalTensor):
        return x
    joined: GlobalTensor = _Join.apply(x)  # type: ignore[no-untyped-call]
    return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> GlobalTensor:
        ctx.set_materialize_grads(False)
        return global_tensor(_part(x), spec_of(x))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


def _part(x: DTensor) -> torch.Tensor:
    """The local part; off the mesh the one that holds no memory, for DTensor's own may hold some."""
    local = local_of(x)
    return nothing(x.dtype, local.device) if is_absent(x.device_mesh) else local


def _present_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op on a rank of the mesh: DTensor's own, on DTensors that share the parts."""
    bare: _Bare = {}
    inner_args = tuple(_unwrapped(value, bare) for value in args)
    inner_kwargs = {name: _unwrapped(value, bare) for name, value in kwargs.items()}
    result = op(*inner_args, **inner_kwargs)
    owners = {id(inner): owner for owner, inner in bare.values()}
    return _rewrapped(result, owners)


_Bare = dict[int, tuple[GlobalTensor, DTensor]]


# Not functions within the one above: these would refer to themselves, and so keep every op's tensors, parts
# and all, until Python looks for cycles.
def _unwrapped(value: Any, bare: _Bare) -> Any:
    """Tensors as DTensors, remembered in `bare` by the identity of each."""
    if isinstance(value, GlobalTensor):
        if id(value) not in bare:
            bare[id(value)] = (value, wrapped(DTensor, local_of(value), spec_of(value)))
        return bare[id(value)][1]
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(item, bare) for item in value)
    return value


def _rewrapped(value: Any, owners: dict[int, GlobalTensor]) -> Any:
    """Results as tensors of this kind: those that an op in place gives back are the arguments themselves."""
    if isinstance(value, DTensor):
        owner = owners.get(id(value))
        if owner is None:
            return global_tensor(local_of(value), spec_of(value))
        set_spec(owner, spec_of(value))  # in place: some ops renumber dims
        return owner
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrapped(item, owners) for item in value)
    return value


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _one_mesh(op: Any, leaves: list[torch.Tensor]) -> DeviceMesh:
    first: DTensor | None = None
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            if first is None:
                first = leaf
            elif leaf.device_mesh != first.device_mesh:
                raise errors.two_meshes(op, first, leaf)
    assert first is not None, "this class was chosen for one of the arguments"
    return first.device_mesh


def _refuse_shapes_from_data(op: Any, args: tuple[Any, ...], leaves: list[torch.Tensor]) -> None:
    if torch.Tag.dynamic_output_shape not in op.tags:
        return
    if op is aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        return  # whole numbers as indices: the shape is theirs
    raise errors.shape_from_data(op, next(leaf for leaf in leaves if isinstance(leaf, DTensor)))


def _refuse_writes_to_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], beside: DTensor) -> None:
    for at, name in written_args(op):
        value = args[at] if at < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            raise errors.plain_written(op, value, beside)


def _placed(op: Any, value: Any, beside: DTensor) -> Any:
    """A plain tensor beside a distributed one: the same on every rank, so replicated."""
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(op, item, beside) for item in value)
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise errors.plain_with_gradient(op, value, beside)
    if value.ndim == 0:
        return value  # DTensor takes these itself
    if value.shape != beside.shape and tuple(value.shape) in _part_shapes(spec_of(beside)):
        raise errors.plain_like_a_part(op, value, beside)
    mesh = beside.device_mesh
    spec = new_spec(mesh, [Replicate()] * mesh.ndim, value.shape, value.stride(), value.dtype)
    local = nothing(value.dtype, local_of(beside).device) if is_absent(mesh) else value
    return global_tensor(local, spec)


def _part_shapes(spec: Spec) -> frozenset[tuple[int, ...]]:
    """The shapes that ranks' parts of a tensor have, where they are not the whole."""
    shape = tuple(spec.shape)
    if not any(type(placement) is Shard for placement in spec.placements):
        return frozenset()
    plain = [p if type(p) is Shard else Replicate() for p in spec.placements]
    regions = layout_on(spec.mesh, tuple(plain)).regions(shape).values()
    return frozenset(region_shape(region) for region in regions) - {shape}
