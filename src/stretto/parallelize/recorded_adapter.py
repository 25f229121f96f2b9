"""Tensors without elements, and trees of arguments.

What it uses of PyTorch besides public names, with a test: the trees of torch.utils._pytree, and
torch.Tensor._make_wrapper_subclass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

OF_SHAPE = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(
            Tensor.is_floating_point,
            torch.is_floating_point,
            Tensor.is_complex,
            torch.is_complex,
            torch.numel,
        ),
    )
)
"""What a tensor without elements answers itself."""


def without_elements(kind: type[Tensor], shape: Sequence[int], like: Tensor) -> Any:
    """A tensor of class `kind` with a shape, and the dtype and device of `like`; no gradient."""
    make: Any = Tensor._make_wrapper_subclass
    return make(kind, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=False)
