"""Batches as trees: named leaves, and the tree again from leaves.

A batch is a tensor, or dicts, lists and tuples of tensors; other leaves (numbers, strings, None) are
constants of the step. The first dim of every tensor is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stretto.constants import text_of
from stretto.errors import UsageError


def flatten(batch: Any) -> dict[str, torch.Tensor]:
    """Leaf name -> tensor, in a fixed order. Names are paths such as `input_ids` or `0.mask`; a batch that
    is one tensor has the name `batch`."""
    leaves: dict[str, torch.Tensor] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, torch.Tensor):
            leaves[_new(path or "batch", leaves)] = item
        elif isinstance(item, Mapping):
            for key, value in item.items():
                walk(value, f"{path}.{key}" if path else str(key))
        elif isinstance(item, (list, tuple)):
            for position, value in enumerate(item):
                walk(value, f"{path}.{position}" if path else str(position))

    walk(batch, "")
    return leaves


def fixed(batch: Any) -> dict[str, str]:
    """Path -> text of the leaves that are no tensors, and of empty dicts, lists and tuples: equal texts for
    equal leaves alone. Capture makes them constants of the step. Raises UsageError for leaves without one."""
    leaves: dict[str, str] = {}

    def walk(item: Any, path: str) -> None:
        if isinstance(item, Mapping) and item:
            for key, value in item.items():
                walk(value, f"{path}.{key}" if path else str(key))
        elif isinstance(item, (list, tuple)) and item:
            for position, value in enumerate(item):
                walk(value, f"{path}.{position}" if path else str(position))
        elif not isinstance(item, torch.Tensor):
            leaves[_new(path or "batch", leaves)] = text_of(item, path or "batch")

    walk(batch, "")
    return leaves


def _new(path: str, leaves: Mapping[str, Any]) -> str:
    if path in leaves:
        raise UsageError(f"the batch has two leaves that are both called {path!r}: name one otherwise")
    return path


def rebuilder(batch: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A function from leaves, in the order of `flatten`, to a tree shaped like `batch`."""

    def rebuild(leaves: Sequence[torch.Tensor]) -> Any:
        left = iter(leaves)

        def walk(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return next(left)
            if isinstance(item, Mapping):
                return {key: walk(value) for key, value in item.items()}
            if isinstance(item, tuple) and hasattr(item, "_fields"):
                return type(item)(*(walk(value) for value in item))
            if isinstance(item, (list, tuple)):
                return type(item)(walk(value) for value in item)
            return item

        return walk(batch)

    return rebuild


def microbatch_shapes(batch: Any, microbatches: int) -> dict[str, torch.Size]:
    """The shape of each leaf of one microbatch. Raises UsageError when the batch does not divide."""
    leaves = flatten(batch)
    if not leaves:
        raise UsageError("the batch holds no tensor; expected a tensor, or a tree (dict, list) of tensors")
    shapes: dict[str, torch.Size] = {}
    sizes: dict[int, str] = {}
    for name, leaf in leaves.items():
        if leaf.dim() == 0:
            raise UsageError(
                f"batch leaf {name!r} has no dims; the first dim of every tensor in the batch is the batch"
            )
        if leaf.shape[0] == 0:
            raise UsageError(
                f"batch leaf {name!r} has no rows; give a batch of the size that will be trained on"
            )
        sizes.setdefault(leaf.shape[0], name)
        if leaf.shape[0] % microbatches:
            raise UsageError(
                f"batch leaf {name!r} has {leaf.shape[0]} rows, which do not divide into {microbatches} "
                f"microbatches; use a batch of a multiple of {microbatches}, or other microbatches"
            )
        shapes[name] = torch.Size((leaf.shape[0] // microbatches, *leaf.shape[1:]))
    if len(sizes) > 1:
        told = ", ".join(f"{name!r} has {size}" for size, name in sizes.items())
        raise UsageError(f"the leaves of the batch differ in their first dim: {told} rows")
    return shapes
