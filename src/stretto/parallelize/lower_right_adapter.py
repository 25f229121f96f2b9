"""Causal attention of a sequence's last queries: each sees the keys up to its own place, counted from the
end.

What it uses of PyTorch besides public names, with a test: aten._scaled_dot_product_flash_attention, whose
`is_causal` means that on CUDA (FlashAttention 2.1 and later). `torch.nn.attention.bias.causal_lower_right`
calls the same, and cannot be made while a graph is captured. Elsewhere there is a mask.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.parallelize.unseen import ON_CUDA, is_now

MAX_HEAD_DIM = 256
"""Flash attention's largest head (Dao 2023, arXiv 2307.08691; sdp_utils.cpp)."""

ALIGNED = 8
"""Elements to which a head's dim is aligned (sdp_utils.cpp: 16 bytes of a 2-byte dtype)."""

HALF = (torch.float16, torch.bfloat16)


def on_cuda(x: Tensor) -> bool:
    """Whether what is called on a tensor will run on CUDA."""
    return x.is_cuda or is_now(ON_CUDA)


def lower_right(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    """query (B, H, S, K), key and value (B, H, T, K), T not below S: query s sees keys up to T - S + s."""
    if (
        on_cuda(query)
        and query.dtype in HALF
        and heads_fit(query, key, value)
        and (query.shape[1] == key.shape[1] or more.get("enable_gqa"))
    ):
        aten: Any = torch.ops.aten
        made, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True, False, scale=more.get("scale")
        )
        return cast(Tensor, made)
    S, T = query.shape[-2], key.shape[-2]
    seen = torch.ones(S, T, dtype=torch.bool, device=query.device).tril(T - S)
    return F.scaled_dot_product_attention(query, key, value, seen, **more)


def heads_fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether CUDA's kernels of attention take such heads."""
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[-1] <= MAX_HEAD_DIM
        and query.shape[-1] % ALIGNED == 0
    )
