"""From an op's name in a program to the function that PyTorch's dispatcher calls, and keys for draws."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from stretto.backend import grouped_adapter as grouped_adapter  # its ops are known from here on
from stretto.backend.schema_adapter import refused
from stretto.errors import RunError
from stretto.ir.program import VIEWS

INSTEAD = dict.fromkeys(VIEWS, "aten.reshape.default")
"""What is called instead: a view where strides allow one, else a copy. Some kernels lay out their result in
another way than their shape functions say (measured: softplus_backward of a transposed gradient on CPU,
PyTorch 2.13), so what was a view in the capture may be none when it runs. Measured cost: 0.1 us."""


def resolve(target: str) -> Callable[..., Any]:
    """The function that computes an op of a name such as `aten.mm.default`.

    Raises RunError for a name that is none of this PyTorch's operators, and for an operator that does other
    things than compute tensors: a plan file may name anything.
    """
    function = overload(target)
    if function is None:
        raise RunError(
            f"PyTorch {torch.__version__} has no operator {target!r}: load what defines it before the plan, "
            "or capture and plan again with this PyTorch"
        )
    if why := refused(function):
        raise RunError(f"{target!r} is no op of a plan: {why}. Capture and plan again")
    return function


def overload(target: str) -> Callable[..., Any] | None:
    """The dispatcher's function of that name; None where this PyTorch has none."""
    found: Any = torch.ops
    parts = INSTEAD.get(target, target).split(".")
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError, ImportError):
        found = None
    # An overload says which operator it is one of; nothing else that can be reached from `torch.ops` does.
    if len(parts) != 3 or getattr(found, "overloadpacket", None) is None or not callable(found):
        return None
    function: Callable[..., Any] = found
    return function


def op_key(name: str) -> int:
    """A number for an op by its name, equal in every process and for every schedule."""
    return zlib.crc32(name.encode())
