"""What an op is called with: uses of values, constants of the framework, and plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Const:
    """A framework constant that JSON has no word for: a dtype, device, layout or memory format."""

    kind: str
    text: str


Arg = Any
"""Ref | Const | None | bool | int | float | str | tuple of Arg."""


def refs(arg: Arg) -> Iterator[str]:
    """The names of the values that an argument uses, in order."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)
