"""Copies of several tensors in another dtype: one kernel on an accelerator, where by themselves they would be
one each.

Uses a private name: `torch._foreach_copy_`. It copies between dtypes in one kernel where all sources are of
one dtype and all results of another; else tensor by tensor. The elements are those of `aten._to_copy`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library.Library("stretto_copies", "DEF")  # type: ignore[no-untyped-call]
_library.define("in_dtype(Tensor[] tensors, *, ScalarType dtype) -> Tensor[]")


def _empty(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]


def _in_dtype(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    result = _empty(tensors, dtype)
    torch._foreach_copy_(result, tensors)
    return result


_library.impl("in_dtype", _in_dtype, "CompositeExplicitAutograd")
torch.library.register_fake("stretto_copies::in_dtype", _empty, lib=_library)
