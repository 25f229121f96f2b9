"""The room of `stretto.tensor` that knows DTensor's private corners (2.11 to 2.13).

What it uses, so that the next release breaks this file alone, with a test for each:

    DTensor(local, spec, requires_grad=)              a DTensor from its parts; `_local_tensor`, `_spec`
    torch.distributed.tensor._dtensor_spec            DTensorSpec, TensorMeta: mesh, placements, shape
    DTensor._op_dispatcher.unwrap_to_op_info          arguments of an op as descriptions
    ...sharding_propagator.propagate_op_sharding_non_cached   the description of an op's results
    DeviceMesh._coordinate_on_dim                     where on a mesh this rank is
    torch.distributed.tensor._redistribute.redistribute_local_tensor   other placements of a part
    torch.distributed.tensor._shards (_StridedShard)        by its `dim`: a shard that no user writes
    torch.distributed.distributed_c10d._get_default_store   the store that all ranks share
    _MaskPartial, by its `mask_buffer`               a sum of what each rank finds in its rows of a table
    torch.utils._python_dispatch._disable_current_modes     tensors without values amid tracing
    torch._subclasses.fake_tensor                    FakeTensorMode, and what it raises
    torch.utils._pytree                              arguments and results as the dispatcher flattens them
    Tensor._version, UntypedStorage._cdata           writes that are counted, memory that is shared
    torch.utils._mode_utils.no_dispatch, torch._C._set_meta_in_tls_dispatch_include   dims changed in place

The schema of an op (`OpOverload._schema`) says which of its arguments it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

SHAPE_UNKNOWN = DynamicOutputShapeException
"""What is raised `without_values` where the shape of a result depends on values."""
VALUES_NEEDED = DataDependentOutputException
"""What is raised there where a result is a value."""
UNKNOWN_RESULTS = (NotImplementedError, UnsupportedOperatorException)
"""What is raised there for an op that only computes."""

Spec = DTensorSpec
"""What DTensor knows of a tensor: mesh, placements, full shape, strides, dtype."""

Meta = TensorMeta
"""(shape, stride, dtype) of a tensor; as ops see it, full."""

Kind = TypeVar("Kind", bound=DTensor)


def local_of(x: DTensor) -> torch.Tensor:
    """The part of this rank, outside autograd; not a copy."""
    local: torch.Tensor = x._local_tensor
    return local


def spec_of(x: DTensor) -> Spec:
    """The description of a tensor."""
    return x._spec


def set_spec(x: DTensor, spec: Spec) -> None:
    """What an op in place does that renumbers dims: same data, another description."""
    x._spec = spec


def part_of(local: torch.Tensor, spec: Spec, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a tensor under other placements of its mesh; all ranks of the mesh call it.

    local: the part under the placements of `spec`. Outside autograd.
    """
    target = with_placements(spec, placements)
    result: torch.Tensor = _redistribute.redistribute_local_tensor(local, spec, target)
    return result


def shown_as(x: DTensor, view: DTensor, op: Any, args: Any, kwargs: Any) -> None:
    """What an op does that changes a tensor's dims in place: x has the view's part, and has its shape."""
    x._local_tensor, x._spec = view._local_tensor, view._spec
    with no_dispatch():  # the op on the wrapper itself, as `return_and_correct_aliasing` does it
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            op(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def wrapped(kind: type[Kind], local: torch.Tensor, spec: Spec, requires_grad: bool = False) -> Kind:
    """A DTensor, or a subclass of it, from the part of this rank and the description."""
    made: Kind = kind(local, spec, requires_grad=requires_grad)
    return made


def new_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Spec:
    """A description. shape, stride: of the full tensor, in elements."""
    return DTensorSpec(mesh, tuple(placements), tensor_meta=Meta(torch.Size(shape), tuple(stride), dtype))


def with_placements(spec: Spec, placements: Sequence[Placement]) -> Spec:
    """The same tensor, placed in another way on its mesh."""
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def meta_of(x: torch.Tensor) -> Meta:
    """What is known of a tensor without values."""
    return Meta(x.shape, tuple(x.stride()), x.dtype)


def described(spec: Spec) -> tuple[tuple[int, ...], torch.dtype]:
    """Full shape and dtype."""
    meta = spec.tensor_meta
    assert meta is not None, "an op's result has a shape"
    return tuple(meta.shape), meta.dtype


def propagated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the results of an op are, by PyTorch's own sharding rules; nothing is computed.

    Returns a Spec, a sequence of Specs and Nones, or None if the result is no tensor. The answer is that of a
    rank of the mesh, wherever this one is: PyTorch 2.13 chooses the cheapest of several ways to shard an
    op, and off the mesh takes all of them to be free, so that ranks would differ over what a tensor is.
    Raises what PyTorch raises where it has no rule for the op.
    """
    return _on_mesh_of(first_of(args, kwargs)._spec, _sharding_of(_schema(op, args, kwargs)).output_spec)


def has_rule(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether PyTorch can say how the results of an op are sharded."""
    try:
        _sharding_of(_schema(op, args, kwargs))
    except Exception:  # whatever a rule trips over
        return False
    return True


def needs_redistribution(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether DTensor would redistribute arguments of an op first. False where it has no rule.

    It also says so where only sizes among the arguments become those of a part.
    """
    schema = _schema(op, args, kwargs)
    try:
        sharding = _sharding_of(schema)
    except NotImplementedError:
        return False
    if not sharding.needs_redistribute or sharding.redistribute_schema is None:
        return bool(sharding.needs_redistribute)
    before, after = _specs(schema), _specs(sharding.redistribute_schema)
    return [spec.placements for spec in before] != [spec.placements for spec in after]


def _schema(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpSchema:
    schema = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    assert schema is not None, "it was asked for"
    return schema


@lru_cache(maxsize=1 << 16)
def _sharding_of(schema: OpSchema) -> Any:
    """PyTorch's own memory of such answers is not asked: DTensor's path off the mesh may have filled it. What
    a rule computes by the way is no op of the program: no mode sees it."""
    meshes = {id(spec.mesh): spec.mesh for spec in _specs(schema)}
    absent = [mesh for mesh in meshes.values() if mesh._coordinate_on_dim is None]
    try:
        for mesh in absent:
            mesh._coordinate_on_dim = (0,) * mesh.ndim
        with outside_modes():
            return DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    finally:
        for mesh in absent:
            mesh._coordinate_on_dim = None


def first_of(args: Any, kwargs: Any) -> DTensor:
    """The first tensor on a mesh among an op's arguments, which has one."""
    return next(x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))


def _on_mesh_of(like: DTensorSpec, found: Any) -> Any:
    """Descriptions on the very mesh of the arguments: what is remembered is on one that was equal to it."""
    if isinstance(found, (list, tuple)):
        return type(found)(_on_mesh_of(like, item) for item in found)
    if not isinstance(found, DTensorSpec) or found.mesh is like.mesh:
        return found
    return DTensorSpec(like.mesh, found.placements, tensor_meta=found.tensor_meta)


def _specs(schema: OpSchema) -> list[DTensorSpec]:
    leaves = tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


@cache
def is_composite(op: Any) -> bool:
    """Whether an op is made of others, for every kind of tensor."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


@cache
def written_args(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an op writes and gives back, as (position, name): in place, or with `out=`.

    Empty for an op that makes new results, though it may write some argument by the way (running statistics).
    """
    schema = op._schema
    if any(result.alias_info is None or not result.alias_info.is_write for result in schema.returns):
        return ()
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def given_back(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What is given for those arguments."""
    return [args[at] if at < len(args) else kwargs[name] for at, name in written_args(op)]


def unmasked(local: torch.Tensor, spec: Spec) -> tuple[torch.Tensor, Spec]:
    """What was looked up in a table whose rows are sharded, as a plain sum: zeros for other ranks' rows.

    DTensor remembers which rows these are in the placement, once for all tensors that are so placed, and
    forgets it at the first use; the second fails.
    """
    buffers = [getattr(placement, "mask_buffer", None) for placement in spec.placements]
    if all(buffer is None for buffer in buffers):
        return local, spec
    for buffer in buffers:
        if buffer is None or buffer.data is None:
            continue  # off the mesh, there is none
        elsewhere = buffer.data
        if elsewhere.dim() < local.dim():
            elsewhere = elsewhere.unsqueeze(-1)
        local = local.masked_fill(elsewhere, 0)
        if buffer.refcount:
            buffer.release_mask()
    placements = [
        p if buffer is None else Partial() for p, buffer in zip(spec.placements, buffers, strict=True)
    ]
    return local, with_placements(spec, placements)


def outside_modes() -> Any:
    """A context in which no mode is active: what is traced around it does not see it."""
    return _disable_current_modes()


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which ops find out what their results are, and compute nothing, outside all modes."""
    with outside_modes(), FakeTensorMode():
        yield


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors show the same memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def writes_of(x: torch.Tensor) -> int | None:
    """How often a tensor, or one that it is a view of, or a view of that one, has been written into. None in
    inference mode, where no one counts."""
    return None if x.is_inference() else int(x._version)


def without_underscore(op: Any) -> Any:
    """Of an op that changes dims in place, the one that gives a view."""
    name = str(op._schema.name).partition("::")[2]
    overload = "int" if name == "transpose_" else op._overloadname
    return getattr(getattr(torch.ops.aten, name.removesuffix("_")), overload)


def plain_placement(placement: Placement) -> Placement:
    """A placement as users know them: of DTensor's inner shards, the Shard of the same dim."""
    if type(placement) in (Shard, Replicate) or placement.is_partial():
        return placement
    dim: int = placement.dim  # type: ignore[attr-defined]
    return Shard(dim)


def shared_store(prefix: str) -> Any:
    """A part of the key-value store through which the ranks of the default process group found each other.

    Its type, `torch.distributed.Store`, is not exported; it has compare_set, check, get, set, delete_key.
    """
    return PrefixStore(prefix, _get_default_store())
