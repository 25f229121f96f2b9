"""From an op's name in a program to the function that PyTorch's dispatcher calls, and keys for draws."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from stretto.ir.program import VIEWS

INSTEAD = dict.fromkeys(VIEWS, "aten.reshape.default")
"""What is called instead: a view where strides allow one, else a copy. Some kernels lay out their result in
another way than their shape functions say (measured: softplus_backward of a transposed gradient on CPU,
PyTorch 2.13), so what was a view in the capture may be none when it runs. Measured cost: 0.1 us."""


def resolve(target: str) -> Callable[..., Any]:
    """The function that computes an op of a name such as `aten.mm.default`."""
    namespace, name, overload = INSTEAD.get(target, target).split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return found


def op_key(name: str) -> int:
    """A number for an op by its name, equal in every process and for every schedule."""
    return zlib.crc32(name.encode())
