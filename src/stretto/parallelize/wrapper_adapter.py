"""The room of parallelize that knows a private corner of PyTorch (2.11 to 2.13).

What it uses, with a test: torch.Tensor._make_wrapper_subclass, a tensor of a class of your own, with a shape
and no elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def without_elements(kind: type[Tensor], shape: Sequence[int], like: Tensor) -> Any:
    """A tensor of class `kind` with a shape, and the dtype and device of `like`; no gradient."""
    make: Any = Tensor._make_wrapper_subclass
    return make(kind, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=False)
