"""An op on tensors of a mesh that is computed here, not by DTensor: on parts, or on replicated tensors.

    1. Some dims of an op are free: what it gives at one index of such a dim depends on nothing at another.
       They are the labels of the op's rule (`stretto.ir.dims`) that need not be full. Of a sum over a label
       each rank has a partial. Along each axis of the mesh, arguments that are sharded along a free dim stay
       so, and those that share it are sharded in the same way; all others become replicated.
    2. The op itself runs on these parts, and its results are sharded as its arguments are. Ops with free dims
       are taken from a list: those whose arguments do not state sizes of the full tensor.
    3. What it writes has afterwards the placements that it had before.

Every rank knows the results' shapes from a run on tensors without values, so that what cannot run is refused
on all of them, those off the mesh too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from stretto.backend.dispatch_adapter import draws
from stretto.ir.dim_rules import SUMMED, Dims, broadcast, labels_of, results_along
from stretto.ir.dims import POOLS, dims_of
from stretto.ir.program import Op, Ref, TensorSpec
from stretto.tensor import errors
from stretto.tensor.clip import Wrap, has_empty_part, in_order, is_absent, layout_on, nothing
from stretto.tensor.dtensor_adapter import (
    SHAPE_UNKNOWN,
    UNKNOWN_RESULTS,
    VALUES_NEEDED,
    Meta,
    Spec,
    TreeSpec,
    given_back,
    local_of,
    meta_of,
    new_spec,
    part_of,
    set_spec,
    spec_of,
    tree_flatten,
    tree_unflatten,
    with_placements,
    without_values,
)
from stretto.tensor.tracing_adapter import captured
from stretto.tensor.trusted import ELEMENT_LOSS_GRADIENTS, ELEMENT_LOSSES, NONE, reduction_of

IN_PARTS = frozenset(
    f"""cumsum cumprod logcumsumexp cummax cummin sort topk kthvalue median nanmedian mode argsort argmax
    argmin max min index_select index_fill index_add index_copy index_reduce gather scatter scatter_add
    scatter_reduce index index_put _index_put_impl constant_pad_nd flip roll tril triu nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward {POOLS}""".split()
)
"""Ops by name, all of their overloads that have a rule, and those in place."""


CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
"""Their batch is free: of a weight's and a bias' gradient each rank has a partial."""


@dataclass(frozen=True, slots=True)
class FreeDim:
    """One free dim of an op. arguments: which dim it is of each argument that is on a mesh, in their order;
    None: not a dim of that one. results: the same for each result, or `SUMMED`."""

    arguments: tuple[int | None, ...]
    results: tuple[int | str | None, ...]


def free_dims(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Meta | None]
) -> list[FreeDim]:
    """The free dims of a call; none if the op is not in the list."""
    if any(argument.is_out for argument in op._schema.arguments):
        return []
    name, _, overload = str(op).removeprefix("aten.").partition(".")
    name = name if name in IN_PARTS else name.removesuffix("_")
    given: list[torch.Tensor] = []
    call = Op(
        "call",
        f"aten.{name}.{overload}",
        _written(args, given),
        tuple((key, _written(value, given)) for key, value in kwargs.items()),
        tuple(None if made is None else _spec(made) for made in results),
    )
    if name in CONVOLUTIONS:
        return _of_batch(name, given, results)
    specs = [_spec(x) for x in given]
    of_elements = op in ELEMENT_LOSSES | ELEMENT_LOSS_GRADIENTS and reduction_of(op, args, kwargs) == NONE
    if name in IN_PARTS:
        rule = dims_of(call, specs)
    elif of_elements or torch.Tag.pointwise in op.tags:
        shape = torch.broadcast_shapes(*(x.shape for x in given))  # type: ignore[no-untyped-call]
        labels = labels_of(len(shape))
        rule = Dims(tuple(broadcast(spec, shape) for spec in specs), (labels,) * len(results))
    else:
        return []
    on_mesh = [at for at, x in enumerate(given) if isinstance(x, DTensor)]
    return [] if rule is None else _free(rule, [rule.inputs[at] for at in on_mesh])


def _of_batch(name: str, given: Sequence[torch.Tensor], results: Sequence[Meta | None]) -> list[FreeDim]:
    """The batch of a convolution: of its image and its result, or of its image and the result's gradient."""
    images = 2 if name == "convolution_backward" else 1
    along = [0 if at < images else None for at, x in enumerate(given) if isinstance(x, DTensor)]
    made = [0 if at == 0 else SUMMED for at in range(len(results))]
    return [FreeDim(tuple(along), tuple(made))]


# No function within the one above, which would refer to itself, and keep the tensors until Python looks for
# cycles.
def _written(value: Any, given: list[torch.Tensor]) -> Any:
    """An argument as programs write it; its tensors come to `given`."""
    if isinstance(value, torch.Tensor):
        given.append(value)
        return Ref(str(len(given)))
    return tuple(_written(item, given) for item in value) if isinstance(value, (list, tuple)) else value


def _spec(x: torch.Tensor | Meta) -> TensorSpec:
    return TensorSpec(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _free(rule: Dims, inputs: Sequence[tuple[int | None, ...]]) -> list[FreeDim]:
    """inputs: labels of the tensors on a mesh."""
    named = dict.fromkeys(label for labels in inputs for label in labels if label is not None)
    result = []
    for label in sorted(named.keys() - rule.full):
        results = results_along(rule, label)
        if results is not None and not (SUMMED in results and rule.added):
            arguments = tuple(labels.index(label) if label in labels else None for labels in inputs)
            result.append(FreeDim(arguments, results))
    return result


def on_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Wrap) -> Any:
    """What an op gives on this rank, on or off the mesh. Results in place are the arguments themselves.

    args, kwargs: with at least one tensor on a mesh, and no plain tensors but 0-d ones.
    Raises UsageError on all ranks for what cannot be computed so.
    """
    leaves, tree = tree_flatten((args, kwargs))
    at = [number for number, leaf in enumerate(leaves) if isinstance(leaf, DTensor)]
    tensors: list[DTensor] = [leaves[number] for number in at]
    mesh = tensors[0].device_mesh
    if draws(op, args, kwargs):
        raise errors.random_op(op, tensors[0])
    returned = given_back(op, args, kwargs)
    answer = _metas(op, _frozen(leaves), tree)
    if answer is UNKNOWN and returned:  # they are what they were
        answer = tuple(map(meta_of, returned)), tree
    if isinstance(answer, str):
        error = errors.shape_from_data if answer == FROM_DATA else errors.cannot_run
        raise error(op, tensors[0], answer)
    described, result_tree = answer

    free = free_dims(op, args, kwargs, described)
    chosen = [_chosen(tensors, axis, free) for axis in range(mesh.ndim)]
    targets = _targets(tensors, chosen)
    if any(has_empty_part(mesh, target, tuple(x.shape)) for x, target in zip(tensors, targets)):
        chosen = [None] * mesh.ndim
        targets = _targets(tensors, chosen)
    ids = {id(x) for x in tensors}
    # A tensor that is given twice is written where it comes first.
    writes = [id(x) for x in written_values(op, args, kwargs)]
    written = {next(at for at, x in enumerate(tensors) if id(x) == one) for one in writes if one in ids}
    for number, x in enumerate(tensors):
        if not in_order(mesh) and targets[number] != tuple(x.placements):
            raise errors.ranks_out_of_order(op, x)

    if is_absent(mesh):
        device = local_of(tensors[0]).device
        parts: list[Any] = [None if meta is None else nothing(meta.dtype, device) for meta in described]
    else:
        own = [_part(x, target) for x, target in zip(tensors, targets)]
        filled = list(leaves)
        for number, part in zip(at, own):
            filled[number] = part
        inner_args, inner_kwargs = tree_unflatten(filled, tree)
        parts, _ = tree_flatten(op(*inner_args, **inner_kwargs))
        for number in written:  # step 3
            if targets[number] != tuple(tensors[number].placements):
                x = tensors[number]
                local_of(x).copy_(
                    part_under(own[number], with_placements(spec_of(x), targets[number]), x.placements)
                )
    if returned:
        for x, meta in zip(returned, described):
            if isinstance(x, DTensor) and meta is not None and tuple(x.shape) != meta.shape:
                set_spec(x, new_spec(mesh, x.placements, meta.shape, meta.stride, meta.dtype))
        return returned[0] if len(returned) == 1 else tuple(returned)
    results: list[Any] = []
    for number, (part, meta) in enumerate(zip(parts, described, strict=True)):
        if meta is None:
            results.append(None)
            continue
        placements = [_placement_along(None if dim is None else dim.results[number]) for dim in chosen]
        results.append(wrap(part, new_spec(mesh, placements, meta.shape, meta.stride, meta.dtype)))
    return tree_unflatten(results, result_tree)


def _chosen(tensors: Sequence[DTensor], axis: int, free: Sequence[FreeDim]) -> FreeDim | None:
    """Step 1, of one axis: the free dim along which the first of the arguments is cut that has one."""
    for number, x in enumerate(tensors):
        placement = x.placements[axis]
        if type(placement) is Shard:
            for dim in free:
                if dim.arguments[number] == placement.dim:
                    return dim
    return None


def _targets(tensors: Sequence[DTensor], chosen: Sequence[FreeDim | None]) -> list[tuple[Placement, ...]]:
    """The placements of each argument."""
    return [
        tuple(_placement_along(None if dim is None else dim.arguments[number]) for dim in chosen)
        for number in range(len(tensors))
    ]


def _placement_along(at: int | str | None) -> Placement:
    if isinstance(at, str):
        return Partial()
    return Replicate() if at is None else Shard(at)


def placed(x: DTensor, placements: Sequence[Placement], wrap: Wrap) -> DTensor:
    """A tensor with other placements on its mesh, for an op below autograd."""
    target = tuple(placements)
    if tuple(x.placements) == target:
        return x
    if not in_order(x.device_mesh):
        raise errors.ranks_out_of_order("redistribute", x)
    spec = with_placements(spec_of(x), target)
    return wrap(local_of(x) if is_absent(x.device_mesh) else _part(x, target), spec)


def _part(x: DTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    if tuple(x.placements) == placements:
        return local_of(x)
    return _laid_out(part_under(local_of(x), spec_of(x), placements), x.stride())


def _laid_out(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A part with its elements in the order that strides of the full tensor say.

    A gathered part comes in an order of its own, and some ops ask how an argument lies: the gradient of a
    determinant takes its matrix to lie as the tensor does.
    """
    shape = local.shape
    if local.numel() == 0 or any(step == 0 for size, step in zip(shape, stride) if size > 1):
        return local
    order = sorted(range(local.ndim), key=lambda dim: (-stride[dim], dim))
    step = 1
    lies = True
    for dim in reversed(order):
        lies = lies and (shape[dim] == 1 or local.stride(dim) == step)
        step *= shape[dim]
    if lies:
        return local
    back = sorted(range(local.ndim), key=order.__getitem__)
    return local.permute(order).contiguous().permute(back)


def part_under(local: torch.Tensor, spec: Spec, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a tensor under other placements of its mesh; all ranks of the mesh call it.

    local: the part under the placements of `spec`. Axes that become Partial go to Replicate first; then of a
    reduced axis the first rank keeps the value, and the others have zeros; of avg, max and min every rank
    keeps it.
    """
    mesh = spec.mesh
    becomes = [new.is_partial() and new != old for old, new in zip(spec.placements, placements)]
    if any(becomes) and captured() is not None:  # there, no rank knows which it is
        return part_of(local, spec, placements)
    through = [Replicate() if reduced else new for reduced, new in zip(becomes, placements)]
    if any(old != new and mesh.size(a) > 1 for a, (old, new) in enumerate(zip(spec.placements, through))):
        local = part_of(local, spec, through)
    new_only = tuple(p if reduced else Replicate() for reduced, p in zip(becomes, placements))
    if any(becomes) and dist.get_rank() in layout_on(mesh, new_only).zero_ranks():
        return torch.zeros_like(local)
    return local


def written_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments that an op writes, also those that it does not give back (running statistics)."""
    result: list[Any] = []
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            result.extend(value if isinstance(value, (list, tuple)) else [value])
    return result


Described = tuple[tuple[Meta | None, ...], TreeSpec]
"""An op's results, one after the other, and how they are given."""


FROM_DATA = "the shape of its result depends on values"
UNKNOWN = "PyTorch does not know what its results are without computing them"


def _frozen(leaves: list[Any]) -> tuple[Any, ...]:
    """Tensors by what they are; numbers with their type, for 1, 1.0 and True are equal."""
    return tuple(
        (leaf.device, meta_of(leaf)) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
        for leaf in leaves
    )


@lru_cache(maxsize=1 << 14)
def _metas(op: Any, frozen: tuple[Any, ...], tree: TreeSpec) -> Described | str:
    """The results, or why there are none. Raises what PyTorch raises for arguments that do not fit."""
    with without_values():
        leaves = [
            torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=kind)
            if isinstance(kind, torch.device)
            else value
            for kind, value in frozen
        ]
        args, kwargs = tree_unflatten(leaves, tree)
        try:
            given, result_tree = tree_flatten(op(*args, **kwargs))
        except SHAPE_UNKNOWN:
            return FROM_DATA
        except VALUES_NEEDED:
            return "what its results are depends on values"
        except UNKNOWN_RESULTS:
            return UNKNOWN
        if any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in given):
            return "its result is sparse"
        return tuple(meta_of(x) if isinstance(x, torch.Tensor) else None for x in given), result_tree
