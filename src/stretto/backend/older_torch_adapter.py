"""What older releases of PyTorch that are supported do wrong, put right; on newer ones nothing happens here.

    a subclass of DTensor   2.11 computes its ops as DTensor's, and never calls its `__torch_dispatch__`
    attention on CPUs       up to 2.12, without values, what it keeps of float64 is described as float32

What it uses besides public names of PyTorch: torch._library.simple_registry.GenericTorchDispatchRuleHolder,
in which `torch.library.register_torch_dispatch` keeps its rules, one for an op and a class.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._library.simple_registry import GenericTorchDispatchRuleHolder

Kind = TypeVar("Kind", bound=type[Tensor])


def asked_itself(kind: Kind) -> Kind:
    """A decorator of a subclass of DTensor: every op on it calls its own `__torch_dispatch__`. PyTorch 2.11
    looks first for a rule for the op and the class; here the class has one for all ops, also of libraries
    that come later."""
    if torch.__version__ >= "2.12":
        return kind
    own = kind.__torch_dispatch__
    result = GenericTorchDispatchRuleHolder.find

    def rule(_kind: type, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return own(op, types, args, kwargs)

    def find(self: GenericTorchDispatchRuleHolder, torch_dispatch_class: type) -> Any:
        return rule if torch_dispatch_class is kind else result(self, torch_dispatch_class)

    GenericTorchDispatchRuleHolder.find = find  # type: ignore[method-assign]
    return kind


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What `aten._scaled_dot_product_flash_attention_for_cpu` gives, without values, as in 2.13.

    query, key, value: (batch, heads, length, width). Sums: (batch, heads, length), laid out by length first.
    """
    batch, heads, length, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    sums = torch.empty((batch, length, heads), dtype=dtype, device=query.device)
    return torch.empty_like(query), sums.transpose(1, 2)


if torch.__version__ < "2.13":
    torch.library.register_fake(
        "aten::_scaled_dot_product_flash_attention_for_cpu", _attention, allow_override=True
    )
