"""Which dim of each leaf is the batch: `batch_dims`, as the user says it, and as marks of the leaves.

`batch_dims` is a tree prefix, as `in_dims` of `torch.func.vmap`: a dim (or None: the same for all rows, so
that every microbatch takes all of it) for all tensors below, or a container like the batch's with such for
its members. Of mappings, named tuples and dataclasses a dict by name will do, and members that it does not
name have dim 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stretto.batch import tree
from stretto.batch.containers import Marked, is_tree, members
from stretto.errors import UsageError, meant

Dims = Any
"""int | None | a mapping, list or tuple of Dims."""


def with_dims(batch: Any, batch_dims: Dims) -> Any:
    """The batch with marks on the leaves whose batch dim is not the first. Raises UsageError for a prefix
    that does not fit it."""
    return marked(batch, dict(_dims(batch, batch_dims, "")))


def marked(batch: Any, dims: Mapping[str, int | None]) -> Any:
    """The same by the leaves' names; one that is marked already stays so, and other leaves are not looked
    at."""
    if not dims:
        return batch

    def leaf(path: str, item: Any) -> Any:
        if path not in dims or not isinstance(item, torch.Tensor):
            return item
        dim = dims[path]
        if dim is not None and dim >= item.dim():
            raise UsageError(
                f"batch leaf {path!r} has shape {list(item.shape)}, and its batch dim is {dim}, by batch_dims"
            )
        return Marked(item, dim)

    return tree.mapped(batch, leaf)


def shape_given(rows_first: tuple[int, ...], dim: int | None) -> tuple[int, ...]:
    """The shape of a leaf as the batch has it, of that with its rows first."""
    rows, *others = rows_first or (0,)
    return (*others[:dim], rows, *others[dim:]) if dim else rows_first


def _dims(item: Any, dims: Dims, path: str) -> Iterator[tuple[str, int | None]]:
    """(leaf, dim) of the tensors whose dim is not 0."""
    inside = members(item)
    where = f"batch_dims of {path!r}" if path else "batch_dims"
    if dims is None or (isinstance(dims, int) and not isinstance(dims, bool)):
        if inside is not None:
            for name, value in inside:
                yield from _dims(value, dims, f"{path}.{name}" if path else name)
        elif isinstance(item, torch.Tensor):
            dim = dims if dims is None else _checked(item, dims, where)
            if dim != 0:
                yield path or "batch", dim
        return
    if inside is None:
        raise UsageError(f"{where} is {dims!r}: give a dim, or None where every microbatch takes all of it")
    named = dict(inside)
    for name, of_member in _by_name(item, named, dims, where).items():
        yield from _dims(named[name], of_member, f"{path}.{name}" if path else name)


def _by_name(item: Any, named: Mapping[str, Any], dims: Dims, where: str) -> dict[str, Dims]:
    if isinstance(dims, (list, tuple)) and isinstance(item, (list, tuple)) and len(dims) == len(item):
        return dict(zip(named, dims, strict=True))
    if not isinstance(dims, Mapping) or not (
        isinstance(item, Mapping) or is_tree(item) or hasattr(item, "_fields")
    ):
        raise UsageError(
            f"{where} is {dims!r:.80}, and the batch has a {type(item).__name__} of {len(named)} there: give "
            "one dim for all of it, or a container like it"
        )
    places = {name: str(at) for at, name in enumerate(getattr(item, "_fields", ()))}
    result = {}
    for key, of_member in dims.items():
        name = places.get(key, str(key))
        if name not in named:
            names = [*(places or named)]
            raise UsageError(
                f"{where} names {key!r}, which the batch lacks; {meant(str(key), names)}it has: "
                f"{', '.join(names)}"
            )
        result[name] = of_member
    return result


def _checked(leaf: torch.Tensor, dim: int, where: str) -> int:
    if not -leaf.dim() <= dim < leaf.dim() and dim != 0:
        raise UsageError(f"{where} is {dim}, and the leaf has {leaf.dim()} dims, of shape {list(leaf.shape)}")
    return dim + leaf.dim() if dim < 0 else dim
