"""Batches as trees: named leaves, and the tree again from leaves.

A batch is a tensor, or mappings, lists, tuples and dataclasses of tensors (`stretto.batch.containers`); other
leaves (numbers, strings, None) are constants of the step. The first dim of every tensor is the batch, unless
`batch_dims` names another (`stretto.batch.dims`), or it is marked with `replicated`. A leaf whose rows are
along another dim is known here with its rows first, which is what is cut and planned; the model's code gets
it as the batch has it.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stretto.batch.constants import text_of
from stretto.batch.containers import Marked, members, with_members
from stretto.errors import UsageError

NUMBERS = (numbers.Real, np.number, np.bool_, np.ndarray)


def replicated(value: Any) -> Marked:
    """Mark a leaf of a batch that is not cut: every microbatch takes all of it, as a tensor.

    value: a tensor of any shape (positions for all rows, weights of classes), or a number, which becomes a
        tensor without dims, of int64 or float64. It may be another one in every step, of the same shape.

        batch = {"input_ids": ids, "labels": labels, "num_items_in_batch": stretto.replicated(tokens)}

    Raises UsageError for anything else.
    """
    if isinstance(value, Marked):
        return value
    if isinstance(value, torch.Tensor):
        return Marked(value, None, by_user=True)
    if isinstance(value, float):
        # As precise as a number of Python is to a model that computes in float64.
        return Marked(torch.tensor(value, dtype=torch.float64), None, by_user=True)
    if isinstance(value, NUMBERS):
        try:
            return Marked(torch.tensor(value), None, by_user=True)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise UsageError(f"stretto.replicated cannot make a tensor of it: {error}") from None
    raise UsageError(f"stretto.replicated marks a tensor or a number, not {type(value).__name__}")


def _leaves(item: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of each leaf, in a fixed order: of what is no container, and of empty ones."""
    inside = members(item)
    if inside is None:
        _refuse_object(path or "batch", item)
        yield path or "batch", item
        return
    for name, value in inside:
        yield from _leaves(value, f"{path}.{name}" if path else name)


def _refuse_object(path: str, item: Any) -> None:
    attributes = {} if isinstance(item, (torch.Tensor, torch.nn.Module)) else getattr(item, "__dict__", {})
    names = [str(name) for name, value in attributes.items() if isinstance(value, torch.Tensor)]
    if names:
        raise UsageError(
            f"batch leaf {path!r} is a {type(item).__name__} with tensors ({', '.join(names)}), and a batch "
            "is made of tensors, mappings, lists, (named) tuples and dataclasses: make it one of these, or "
            "give vars(it), a dict, and read it by keys"
        )


def flatten(batch: Any) -> dict[str, torch.Tensor]:
    """Leaf name -> tensor, its rows first, in a fixed order. Names are paths such as `input_ids` or `0.mask`;
    a batch that is one tensor has the name `batch`."""
    leaves: dict[str, torch.Tensor] = {}
    for path, item in _leaves(batch):
        if isinstance(item, (torch.Tensor, Marked)):
            leaves[_new(path, leaves)] = item.rows_first if isinstance(item, Marked) else item
    return leaves


def mapped(batch: Any, change: Callable[[str, Any], Any]) -> Any:
    """The tree with other leaves. change: path and leaf -> the leaf."""

    def walk(item: Any, path: str) -> Any:
        inside = members(item)
        if inside is None:
            return change(path or "batch", item)
        values = [walk(value, f"{path}.{name}" if path else name) for name, value in inside]
        return with_members(item, values)

    return walk(batch, "")


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with other tensors, of the same dims, and the same marks."""

    def leaf(_: str, item: Any) -> Any:
        if isinstance(item, Marked):
            return Marked(change(item.tensor), item.dim, item.by_user)
        return change(item) if isinstance(item, torch.Tensor) else item

    return mapped(batch, leaf)


def check_no_gradient(name: str, leaf: torch.Tensor) -> None:
    """Raises UsageError for a leaf that waits for a gradient: a step gives gradients to parameters alone."""
    if leaf.requires_grad:
        raise UsageError(
            f"batch leaf {name!r} requires a gradient, and a step gives none to its batch: detach it "
            "(x.detach()). What is trained belongs in the model, as a parameter or as the module that makes "
            "the leaf; for a gradient that the loss needs, call torch.autograd.grad within the loss, at "
            "x.detach().requires_grad_()"
        )


def replicated_leaves(batch: Any) -> tuple[str, ...]:
    """Names of the leaves that every microbatch takes in full, in the order of `flatten`."""
    return tuple(path for path, item in _leaves(batch) if isinstance(item, Marked) and item.dim is None)


def said_dims(batch: Any) -> tuple[tuple[str, int | None], ...]:
    """(leaf, dim) of those that `batch_dims` names, of which the batch itself says nothing."""
    return tuple(
        (path, item.dim) for path, item in _leaves(batch) if isinstance(item, Marked) and not item.by_user
    )


def fixed(batch: Any) -> dict[str, str]:
    """Path -> text of the leaves that are no tensors, and of empty dicts, lists and tuples: equal texts for
    equal leaves alone. Capture makes them constants of the step. Raises UsageError for leaves without one."""
    leaves: dict[str, str] = {}
    for path, item in _leaves(batch):
        if not isinstance(item, (torch.Tensor, Marked)):
            leaves[_new(path, leaves)] = text_of(item, path)
    return leaves


def _new(path: str, leaves: Mapping[str, Any]) -> str:
    if path in leaves:
        raise UsageError(f"the batch has two leaves that are both called {path!r}: name one otherwise")
    return path


def rebuilder(batch: Any) -> Callable[[Sequence[Any]], Any]:
    """A function from leaves, in the order of `flatten`, to a tree shaped like `batch`."""

    def rebuild(leaves: Sequence[Any]) -> Any:
        left = iter(leaves)

        def leaf(_: str, item: Any) -> Any:
            if isinstance(item, Marked):
                return item.like_given(next(left))
            return next(left) if isinstance(item, torch.Tensor) else item

        return mapped(batch, leaf)

    return rebuild


def microbatch_shapes(batch: Any, microbatches: int) -> dict[str, torch.Size]:
    """The shape of each leaf of one microbatch. Raises UsageError when the batch does not divide."""
    leaves, given_replicated = flatten(batch), replicated_leaves(batch)
    if not leaves:
        raise UsageError("the batch has no tensor; expected a tensor, or a tree (dict, list) of tensors")
    cut = {name: leaf for name, leaf in leaves.items() if name not in given_replicated}
    if not cut:
        raise UsageError(
            "every leaf of the batch is marked with stretto.replicated, or None in batch_dims, so that no "
            "microbatch is a part of it; leave the marks off those with a row for each sample"
        )
    for name, leaf in cut.items():
        if leaf.dim() == 0:
            raise UsageError(
                f"batch leaf {name!r} has no dims, so that it cannot be cut into microbatches: mark it "
                f"stretto.replicated(x), and every microbatch takes it; it may be another in every step"
            )
        if leaf.shape[0] == 0:
            raise UsageError(
                f"batch leaf {name!r} has no rows; give a batch of the size that will be trained on"
            )
    _check_rows({name: leaf.shape for name, leaf in cut.items()})
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    for name, leaf in cut.items():
        if leaf.shape[0] % microbatches:
            raise UsageError(
                f"batch leaf {name!r} has {leaf.shape[0]} rows, which do not divide into {microbatches} "
                f"microbatches; use a batch of a multiple of {microbatches}, or other microbatches"
            )
        shapes[name] = torch.Size((leaf.shape[0] // microbatches, *leaf.shape[1:]))
    return shapes


def rows(batch: Any) -> int:
    """How many rows a batch has. Raises UsageError for one whose leaves have several numbers."""
    shapes = microbatch_shapes(batch, 1)
    cut = shapes.keys() - {*replicated_leaves(batch)}
    return int(next(shapes[name][0] for name in shapes if name in cut))


def _check_rows(shapes: Mapping[str, torch.Size]) -> None:
    sizes: dict[int, str] = {}
    for name, shape in shapes.items():
        sizes.setdefault(shape[0], name)
    if len(sizes) == 1:
        return
    sizes_of = ", ".join(f"{name!r} has {size}" for size, name in sizes.items())
    [(rows, _)] = Counter(shape[0] for shape in shapes.values()).most_common(1)
    other, shape = next((name, shape) for name, shape in shapes.items() if shape[0] != rows)
    meant = list(shape).index(rows) if rows in shape else None
    raise UsageError(
        f"the leaves of the batch differ in their first dim: {sizes_of} rows. Say where the batch's dim is: "
        f"capture(..., batch_dims={{{other!r}: {meant}}}), with None for what is the same for all rows, "
        "which every microbatch takes in full"
    )
