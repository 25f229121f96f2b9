"""The global view: PyTorch's DTensor, and what it lacks where tensors are on several meshes.

`GlobalTensor` is DTensor with one thing put before every op. What forced it, all with PyTorch 2.13:

* a rank off the mesh computes on empty parts, or fails (see `stretto.tensor.clip`);
* `redistribute` to another mesh raises nothing and moves nothing: here it is `stretto.reshard`;
* a plain tensor beside a distributed one is refused: here it counts as replicated, unless that is ambiguous;
* rules that are wrong, or give an error on one rank alone (`stretto.tensor.trusted`);
* a view that DTensor gathers is a copy, and what is written into it is lost (`stretto.tensor.views`);
* two meshes in one op, shapes that depend on data, `item` off the mesh: errors on some ranks only.

A plain DTensor that meets a `GlobalTensor` in an op joins: the result is a `GlobalTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.backend.older_torch_adapter import asked_itself
from stretto.tensor import errors, views
from stretto.tensor.clip import absent_call, in_order, is_absent, layout_on, nothing
from stretto.tensor.dtensor_adapter import (
    Spec,
    given_back,
    has_rule,
    is_composite,
    local_of,
    needs_redistribution,
    new_spec,
    set_spec,
    spec_of,
    unmasked,
    with_placements,
    wrapped,
)
from stretto.tensor.layout import region_shape
from stretto.tensor.parts import on_parts, placed, written_values
from stretto.tensor.trusted import (
    has_sound_rule,
    is_like,
    is_partial,
    is_trusted,
    keeps_partial,
    over_the_whole,
)

aten = torch.ops.aten

VALUES = frozenset({aten._local_scalar_dense.default, aten.allclose.default})
"""Ops that give numbers: those of the full tensor, not of this rank's part."""


@asked_itself
class GlobalTensor(DTensor):
    """One tensor as all ranks see it: full shape, dtype, device, mesh and placements, on every rank.

    Ranks of its mesh have parts of it; the others have nothing, and compute nothing. Made by
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
        if not all(isinstance(leaf, DTensor) for leaf in leaves):
            beside = next(leaf for leaf in leaves if isinstance(leaf, DTensor))
            for value in given_back(op, args, kwargs):
                if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                    raise errors.plain_written(op, value, beside)
            args = tuple(_placed(op, value, beside) for value in args)
            kwargs = {name: _placed(op, value, beside) for name, value in kwargs.items()}
        if op in VALUES:
            return op(*(known_full(value, op) for value in args), **kwargs)
        if op is aten.equal.default:  # all ranks, those off the mesh too, take part in DTensor's own
            return _present_call(op, tuple(_made_whole(value) for value in args), kwargs)
        views.check(op, args, kwargs)
        if views.renumbers(op):
            return views.renumbered(op, args, kwargs)
        result = _computed(op, args, kwargs, mesh)
        if views.is_view(op):
            views.remember(op, args, kwargs, result)
        return result

    def redistribute(  # type: ignore[override]
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> DTensor:
        """DTensor's `redistribute`, for module styles; to another mesh it is `stretto.reshard`. It returns
        when the part is there, whatever `async_op` says."""
        mesh = self.device_mesh if device_mesh is None else device_mesh
        placements = [Replicate()] * mesh.ndim if placements is None else placements
        (how,) = _moved_by
        return how(self, mesh, placements)

    def to_local(self, **options: Any) -> torch.Tensor:
        """This rank's part. Raises UsageError on a rank off the mesh; `stretto.local` gives None there."""
        if is_absent(self.device_mesh):
            raise errors.part_off_mesh("to_local", self, dist.get_rank())
        return DTensor.to_local(self, **options)

    def full_tensor(self, **options: Any) -> torch.Tensor:
        """The full tensor. Raises UsageError on a rank off the mesh; `stretto.reshard` brings it there."""
        if is_absent(self.device_mesh):
            raise errors.part_off_mesh("full_tensor", self, dist.get_rank())
        return DTensor.full_tensor(self, **options)

    def tolist(self) -> Any:
        """The values of the full tensor. All ranks of its mesh call it. Raises UsageError off the mesh."""
        return known_full(self, "tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The full tensor as an array. All ranks of its mesh call it. Raises UsageError off the mesh."""
        if self.requires_grad and not force:
            raise errors.wants_gradient("numpy", self)
        return known_full(self.detach(), "numpy").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        result = self.numpy()
        return result if dtype is None else result.astype(dtype, copy=False)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 and spec else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kept = "not on this rank" if is_absent(self.device_mesh) else f"this rank's part: {local_of(self)}"
        return f"GlobalTensor({errors.tensor_name(self)}; {kept})"


Redistribute = Callable[[GlobalTensor, DeviceMesh, Sequence[Placement]], GlobalTensor]
"""(tensor, mesh, placements) -> the tensor there."""

_moved_by: list[Redistribute] = []


def moved_by(how: Redistribute) -> None:
    """Say how tensors come to other placements. `stretto.tensor.reshard` does, which this room serves."""
    _moved_by[:] = [how]


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
    """The local part; off the mesh the one without memory, for DTensor's own may use some."""
    local = local_of(x)
    return nothing(x.dtype, local.device) if is_absent(x.device_mesh) else local


def _computed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """An op by the way that is right for it: other ops, DTensor's own, or by parts."""
    tensors = [x for x in _tensors(args, kwargs) if isinstance(x, DTensor)]
    result = over_the_whole(op, args, kwargs, tensors)
    if result is not NotImplemented:
        return result
    if any(is_partial(x) for x in tensors):
        if any(x is w and is_partial(x) for w in written_values(op, args, kwargs) for x in tensors):
            return on_parts(op, args, kwargs, global_tensor)
        if is_like(op):
            args = tuple(_reduced(value, moves=False) for value in args)
        elif not keeps_partial(op, args, kwargs, tensors):
            args = tuple(_reduced(value) for value in args)
            kwargs = {name: _reduced(value) for name, value in kwargs.items()}
            tensors = [x for x in _tensors(args, kwargs) if isinstance(x, DTensor)]
    if is_trusted(op, args, kwargs, tensors) and has_sound_rule(op, args, kwargs, tensors):
        if not in_order(mesh) and needs_redistribution(op, args, kwargs):
            raise errors.ranks_out_of_order(op, tensors[0])
        try:
            if is_absent(mesh):
                return absent_call(op, args, kwargs, global_tensor)
            return _present_call(op, args, kwargs)
        except Exception:
            if has_rule(op, args, kwargs):
                raise
    if is_composite(op):
        result = op.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return on_parts(op, args, kwargs, global_tensor)


def _reduced(value: Any, moves: bool = True) -> Any:
    """Partial tensors reduced; not where their shape alone counts, which are as if they were replicated."""
    if isinstance(value, (list, tuple)):
        return type(value)(_reduced(item, moves) for item in value)
    if not isinstance(value, DTensor) or not is_partial(value):
        return value
    full = [Replicate() if p.is_partial() else p for p in value.placements]
    if moves:
        return placed(value, full, global_tensor)
    return global_tensor(local_of(value), with_placements(spec_of(value), full))


def known_full(value: Any, op: object) -> Any:
    """The full tensor, a plain one, for who asks for its value. Ranks of its mesh call it together.

    Raises UsageError on a rank off the mesh, which has no value.
    """
    if not isinstance(value, DTensor):
        return value
    if is_absent(value.device_mesh):
        raise errors.value_off_mesh(op, value, dist.get_rank())
    return local_of(_made_whole(value))


def _made_whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return placed(value, [Replicate()] * value.device_mesh.ndim, global_tensor)


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
            return global_tensor(*unmasked(local_of(value), spec_of(value)))
        set_spec(owner, spec_of(value))  # in place: some ops renumber dims
        return owner
    if isinstance(value, (list, tuple)):
        return type(value)(_rewrapped(item, owners) for item in value)
    return value


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    result = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            result.append(value)
        elif isinstance(value, (list, tuple)):
            result.extend(item for item in value if isinstance(item, torch.Tensor))
    return result


def _one_mesh(op: Any, leaves: list[torch.Tensor]) -> DeviceMesh:
    first: DTensor | None = None
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            if first is None:
                first = leaf
            elif leaf.device_mesh != first.device_mesh:
                raise errors.two_meshes(op, leaf, first)
    assert first is not None, "this class was chosen for one of the arguments"
    return first.device_mesh


def _placed(op: Any, value: Any, beside: DTensor) -> Any:
    """A plain tensor beside a distributed one: the same on every rank, so replicated."""
    if isinstance(value, (list, tuple)):
        return type(value)(_placed(op, item, beside) for item in value)
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise errors.plain_with_gradient(op, value, beside)
    if value.layout is not torch.strided:
        raise errors.sparse(op, value, beside)
    if value.ndim == 0:
        return value  # DTensor takes these itself
    if value.shape != beside.shape and tuple(value.shape) in _part_shapes(spec_of(beside)):
        raise errors.plain_like_a_part(op, value, beside)
    mesh = beside.device_mesh
    spec = new_spec(mesh, [Replicate()] * mesh.ndim, value.shape, value.stride(), value.dtype)
    local = nothing(value.dtype, local_of(beside).device) if is_absent(mesh) else value
    return global_tensor(local, spec)


def _part_shapes(spec: Spec) -> frozenset[tuple[int, ...]]:
    """The shapes that ranks' parts of a tensor have, where they are not the full tensor."""
    shape = tuple(spec.shape)
    if not any(type(placement) is Shard for placement in spec.placements):
        return frozenset()
    plain = [p if type(p) is Shard else Replicate() for p in spec.placements]
    regions = layout_on(spec.mesh, tuple(plain)).regions(shape).values()
    return frozenset(region_shape(region) for region in regions) - {shape}
