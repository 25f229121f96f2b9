"""Attention of chunks of queries to full keys and values: each chunk reads the keys that it may see.

Dropout within attention draws for a query and a key what it draws in the uncut model: for all of them at
once, as PyTorch does where no kernel drops (a processor); the weights are then written out. A kernel that
drops draws by itself, otherwise for chunks than for the full tensor, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import UsageError
from stretto.parallelize.chunked import Chunked, by_chunk, joined
from stretto.parallelize.lower_right_adapter import lower_right, on_cuda


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    lengths: Sequence[int] | None = None,
    **more: Any,
) -> Tensor:
    """As `F.scaled_dot_product_attention`, in chunks of the queries (B, H, S, K); keys and values are
    unsharded.
    lengths: of the chunks, for queries that are not cut yet."""
    key, value, attn_mask = joined((key, value, attn_mask))
    if type(query) is not Chunked:
        assert lengths is not None
        query = Chunked(torch.split(query, list(lengths), -2), query.dim() - 2)
    shorter = is_causal and key.shape[-2] < query.shape[-2]
    both = is_causal and attn_mask is not None  # in which kernels differ
    if query.cut_dim != query.dim() - 2 or query.blocks != 1 or shorter or both:
        return F.scaled_dot_product_attention(
            query.joined(), key, value, attn_mask, dropout_p, is_causal, **more
        )
    kept = _kept(query, key, dropout_p) if dropout_p else None
    ends = list(accumulate(chunk.shape[-2] for chunk in query.parts))

    def of(at: int) -> Tensor:
        chunk, end = query.parts[at], ends[at]
        start = end - chunk.shape[-2]
        seen, mask = end if is_causal else key.shape[-2], attn_mask
        keys, values = key[..., :seen, :], value[..., :seen, :]
        if mask is not None and mask.shape[-2] != 1:
            mask = mask[..., start:end, :]
        if kept is not None:
            return _dropped(chunk, keys, values, mask, is_causal, kept[..., start:end, :seen], **more)
        if is_causal and start:
            return lower_right(chunk, keys, values, **more)
        return F.scaled_dot_product_attention(chunk, keys, values, mask, 0.0, is_causal, **more)

    return Chunked(by_chunk(of, len(ends)), query.dim() - 2)


def _kept(query: Chunked, key: Tensor, p: float) -> Tensor:
    """What the uncut model's attention weights are multiplied with: 0 or 1 / (1 - p), (B, H, S, T)."""
    if on_cuda(query.parts[0]):
        raise UsageError(
            f"attention drops with p = {p}, and its kernel on CUDA draws for each chunk of the sequence "
            "by itself, not what it draws in the uncut model: give attention no dropout, or leave "
            "ampipe_degree out"
        )
    shape = (*query.shape[:-1], key.shape[-2])
    return F.dropout(torch.ones(shape, dtype=query.dtype, device=query.device), p)


def _dropped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    kept: Tensor,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Weights times what is kept of them, times values. A query that sees no key becomes zero."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        S, T = scores.shape[-2:]
        mask = torch.ones(S, T, dtype=torch.bool, device=query.device).tril(T - S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
    return weights * kept @ value
