"""From an op's name in a program to the function that PyTorch's dispatcher calls, and keys for draws."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch


def resolve(target: str) -> Callable[..., Any]:
    """The dispatcher's function of a name such as `aten.mm.default`."""
    namespace, name, overload = target.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def op_key(name: str) -> int:
    """A number for an op by its name, equal in every process and for every schedule."""
    return zlib.crc32(name.encode())
