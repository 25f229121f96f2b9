"""Along which dims of its tensors an op can be computed part by part.

A dim is free if what the op gives at one index of it depends on nothing at another: of `cumsum(x, dim)` all
dims but `dim`. Arguments that share a free dim have it at equal sizes, so that their parts fit. The table
says less than what is true where it is in doubt: an op without free dims is computed on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stretto.tensor.losses import BACKWARD_OF_ELEMENTS, NONE, OF_ELEMENTS
from stretto.tensor.parts import SUMMED, FreeDim, numbered
from stretto.tensor.pytree_adapter import tree_leaves

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Call:
    """An op with its arguments by name. tensors: those on a mesh, in their order; numbers: which of them an
    argument is."""

    op: Any
    named: dict[str, Any]
    tensors: tuple[DTensor, ...]
    numbers: dict[str, int]

    def tensor(self, name: str) -> DTensor:
        """The tensor of a name."""
        return self.tensors[self.numbers[name]]


def call_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The arguments of a call by name, with those that were left out."""
    named: dict[str, Any] = {}
    for at, argument in enumerate(op._schema.arguments):
        if at < len(args):
            named[argument.name] = args[at]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            named[argument.name] = argument.default_value
    tensors = tuple(x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))
    numbers = {name: at[0] for name, at in numbered(op, args, kwargs).items() if len(at) == 1}
    return Call(op, named, tensors, numbers)


def free_dims(call: Call) -> tuple[FreeDim, ...]:
    """The free dims of an op; none if it is not in the table."""
    if any(argument.is_out for argument in call.op._schema.arguments):
        return ()
    name = call.op._schema.name.removeprefix("aten::")
    rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
    if rule is not None:
        return rule(call)
    of_elements = call.op in OF_ELEMENTS | BACKWARD_OF_ELEMENTS and call.named["reduction"] == NONE
    if of_elements or torch.Tag.pointwise in call.op.tags:
        return pointwise(call)
    return ()


Rule = Callable[[Call], tuple[FreeDim, ...]]


def pointwise(call: Call) -> tuple[FreeDim, ...]:
    """All dims of the result: those of the arguments, from the last one on, where they are not broadcast."""
    shape = torch.broadcast_shapes(*(x.shape for x in call.tensors))  # type: ignore[no-untyped-call]
    found = []
    for dim, size in enumerate(shape):
        arguments = tuple(
            None if (at := dim - len(shape) + x.ndim) < 0 or x.shape[at] != size else at for x in call.tensors
        )
        found.append(FreeDim(arguments, (dim,) * len(call.op._schema.returns)))
    return tuple(found)


def beside(*tied: str, aligned: tuple[str, ...] = (), last: int = 0) -> Rule:
    """All dims of `self` but some.

    tied: the arguments that name the others, one or several; if one is None or empty, no dim is free.
    aligned: further arguments that have the dims of `self`, where they have the same size.
    last: so many of the last dims are tied, too.
    """

    def rule(call: Call) -> tuple[FreeDim, ...]:
        if "self" not in call.numbers:
            return ()  # a plain tensor without dims
        x = call.tensor("self")
        held: set[int] = set(range(x.ndim - last, x.ndim))
        for name in tied:
            value = call.named.get(name)
            dims = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
            if not dims:
                return ()
            held |= {dim % x.ndim for dim in dims if x.ndim}
        cut = {call.numbers[name] for name in ("self", *aligned) if name in call.numbers}
        others = [call.tensors[number] for number in cut]
        if any(other.ndim != x.ndim for other in others):
            return ()
        dropped = call.named.get("keepdim") is False
        found = []
        for dim in range(x.ndim):
            if dim in held or any(other.shape[dim] != x.shape[dim] for other in others):
                continue
            arguments = tuple(dim if number in cut else None for number in range(len(call.tensors)))
            after = dim - sum(h < dim for h in held) if dropped else dim
            found.append(FreeDim(arguments, (after,) * len(call.op._schema.returns)))
        return tuple(found)

    return rule


def labels(call: Call) -> tuple[FreeDim, ...]:
    """`nll_loss` and its backward pass: all dims but the classes. Of a sum, each rank has an addend."""
    x = call.tensor("self")
    grad = call.numbers.get("grad_output")
    none = call.named["reduction"] == NONE
    found = []
    for dim in range(x.ndim):
        if dim == 1 or x.ndim == 1:
            continue
        row = dim if dim == 0 else dim - 1
        arguments: list[int | None] = [None] * len(call.tensors)
        for name, at in (("self", dim), ("target", row)):
            arguments[call.numbers[name]] = at
        if "backward" in call.op._schema.name:
            if grad is not None and none:
                arguments[grad] = row
            results: tuple[int | str | None, ...] = (dim,)
        else:
            results = (row, None) if none else (SUMMED, SUMMED)
        found.append(FreeDim(tuple(arguments), results))
    return tuple(found)


def attention(call: Call) -> tuple[FreeDim, ...]:
    """Batch and heads of scaled-dot-product attention, forward and backward; a mask may be broadcast."""
    query = call.tensor("query")
    rows = ("grad_out", "query", "key", "value", "out", "logsumexp")
    mask = call.numbers.get("attn_mask")
    found = []
    for dim in (0, 1):
        arguments: list[int | None] = [None] * len(call.tensors)
        sizes = set()
        for name in rows:
            number = call.numbers.get(name)
            if number is not None:
                arguments[number] = dim
                sizes.add(call.tensors[number].shape[dim])
        if mask is not None:
            x = call.tensors[mask]
            if x.ndim == query.ndim and x.shape[dim] == query.shape[dim]:
                arguments[mask] = dim
        if len(sizes) == 1:
            found.append(FreeDim(tuple(arguments), (dim,) * len(call.op._schema.returns)))
    return tuple(found)


def indexed(call: Call) -> tuple[FreeDim, ...]:
    """`x[i, j]`, and `values` written into it: the dims that no index is for, if indices stand together."""
    x = call.tensor("self")
    indices = call.named["indices"]
    there = [at for at, index in enumerate(indices) if index is not None]
    if not there or there != list(range(there[0], there[-1] + 1)):
        return ()
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return ()  # a mask has several dims
    count = max(index.ndim for index in indices if index is not None)
    shift = count - len(there)
    values = call.numbers.get("values")
    found = []
    for dim in range(x.ndim):
        if dim in there:
            continue
        after = dim if dim < there[0] else dim + shift
        arguments: list[int | None] = [None] * len(call.tensors)
        arguments[call.numbers["self"]] = dim
        if values is not None:
            # Values are broadcast from the last dim on.
            given = call.tensors[values]
            at = given.ndim - (x.ndim + shift) + after
            if at >= 0 and given.shape[at] == x.shape[dim] != 1:
                arguments[values] = at
            elif at >= 0 and given.shape[at] != 1:
                continue
        found.append(FreeDim(tuple(arguments), (after if values is None else dim,)))
    return tuple(found)


def images(call: Call) -> tuple[FreeDim, ...]:
    """Batch and channels of an op of all else of an image, such as pooling."""
    names = [name for name in ("self", "grad_output", "indices") if name in call.numbers]
    spatial = int(next(c for c in call.op._schema.name if c in "123"))
    cut = {call.numbers[name] for name in names}
    if any(call.tensors[number].ndim != spatial + 2 for number in cut):
        return ()
    arguments = [[dim if n in cut else None for n in range(len(call.tensors))] for dim in (0, 1)]
    return tuple(FreeDim(tuple(arguments[dim]), (dim,) * len(call.op._schema.returns)) for dim in (0, 1))


def padded(call: Call) -> tuple[FreeDim, ...]:
    """All dims but the last ones, which are padded."""
    return beside(last=len(call.named["pad"]) // 2)(call)


_ONE = beside("dim")
_INDEXED = beside("dim", aligned=("source",))
_SCATTERED = beside("dim", aligned=("index", "src"))

RULES: dict[str, Rule] = {
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _ONE),
    **dict.fromkeys(("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "argsort"), _ONE),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "index_select", "index_fill"), _ONE),
    **dict.fromkeys(("index_add", "index_copy", "index_reduce"), _INDEXED),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _SCATTERED),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), indexed),
    **dict.fromkeys((f"avg_pool{n}d{way}" for n in (2, 3) for way in ("", "_backward")), images),
    **dict.fromkeys((f"max_pool{n}d_with_indices{way}" for n in (2, 3) for way in ("", "_backward")), images),
    **dict.fromkeys((f"_adaptive_avg_pool{n}d{way}" for n in (2, 3) for way in ("", "_backward")), images),
    "constant_pad_nd": padded,
    "flip": beside("dims"),
    "roll": beside("dims"),
    **dict.fromkeys(("tril", "triu"), beside(last=2)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward"), labels),
    **dict.fromkeys(("nll_loss2d_forward", "nll_loss2d_backward"), labels),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention,
}
"""Ops by name, all of their overloads and those in place."""
