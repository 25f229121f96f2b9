"""What a batch's tree is made of: containers, their members by name, and the same containers again.

    any Mapping       (dict, OrderedDict, transformers' BatchEncoding and outputs) by its keys
    list, tuple       by position; a named tuple too
    a dataclass       by its fields, where any of them has a tensor; else it is a leaf

A container is made again as it was: of its class, with what else it has (`copy.copy`); so it is read in a
microbatch as in the batch, by keys or by attributes. A mapping that cannot be written becomes a dict.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch


def members(item: Any) -> Iterator[tuple[str, Any]] | None:
    """Name and value of each member, in a fixed order; None of what is a leaf, as an empty container is."""
    if isinstance(item, Mapping):
        return ((str(key), value) for key, value in item.items()) if item else None
    if isinstance(item, (list, tuple)):
        return ((str(at), value) for at, value in enumerate(item)) if item else None
    if is_tree(item):
        return ((name, getattr(item, name)) for name in _fields(item))
    return None


def with_members(item: Any, values: Sequence[Any]) -> Any:
    """The container with other members, in the order of `members`."""
    if isinstance(item, Mapping):
        return _mapping(item, dict(zip(item, values, strict=True)))
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*values)
    if isinstance(item, (list, tuple)):
        return type(item)(values)
    made = copy.copy(item)
    for name, value in zip(_fields(item), values, strict=True):
        object.__setattr__(made, name, value)  # of a frozen one too
    return made


def _mapping(item: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(item) is dict or not isinstance(item, MutableMapping):
        return values
    made = copy.copy(item)
    for key, value in values.items():
        made[key] = value
    return made


def is_tree(item: Any) -> bool:
    """Whether it is an instance of a dataclass with a tensor in it."""
    if not dataclasses.is_dataclass(item) or isinstance(item, (type, Marked)):
        return False
    return any(_has_tensor(getattr(item, name)) for name in _fields(item))


def _fields(item: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]


def _has_tensor(item: Any) -> bool:
    if isinstance(item, (torch.Tensor, Marked)):
        return True
    inside = members(item)
    return inside is not None and any(_has_tensor(value) for _, value in inside)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Marked:
    """A tensor of the batch of which more is said. dim: along which its rows are; None where every microbatch
    takes all of it. by_user: whether `replicated` says so in the batch itself."""

    tensor: torch.Tensor
    dim: int | None
    by_user: bool = False

    @property
    def rows_first(self) -> torch.Tensor:
        """With its rows along the first dim, where it has rows; a view."""
        return self.tensor if self.dim is None else self.tensor.movedim(self.dim, 0)

    def like_given(self, rows_first: Any) -> Any:
        """What has its rows first, as the batch has it; a view."""
        return rows_first if self.dim is None else rows_first.movedim(0, self.dim)
