"""What MindSpeed's pages forbid beside AMPipe and pipe-experts: each runs here, and equals the plain model.

Weight gradients by themselves, recomputation, gradient sums inside the backward, attention that is not flash,
more than two chunks, slices whose number is no multiple of the chunks'.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.config import Parallel
from stretto.parallelize.ampipe import Chunks, ampipe
from tests.parallelize.test_ampipe import by_chunks
from tests.parallelize.test_experts import ALL, DROPLESS, FEW, assert_equals, model_of

PIPELINE: dict[str, Any] = {"ep": 2, "dp": 2, "pp": 2, "microbatches": 4, "ampipe_degree": 2}
SLICES: dict[str, Any] = {"pipe_experts": True, "pipe_experts_multi_data": 3}
CASES: list[tuple[float | None, dict[str, Any]]] = [
    (ALL, {**PIPELINE, **SLICES, "schedule": "zb-h1"}),
    (DROPLESS, {**PIPELINE, "schedule": "zb-h2", "pipe_experts_multi_data": 3}),
    (ALL, {**PIPELINE, **SLICES, "recompute": "full"}),
    (DROPLESS, {**PIPELINE, "recompute": "selective", "pipe_experts_multi_data": 3}),
    (ALL, {**PIPELINE, **SLICES, "recompute": "gathers"}),
    (DROPLESS, {**PIPELINE, "recompute": 10**9}),
    (FEW, {**PIPELINE, "recompute": "full", "schedule": "zb-h1"}),
    (FEW, {"ep": 2, "dp": 4, "ampipe_degree": 2, **SLICES}),
    (DROPLESS, {"ep": 2, "dp": 4, "pp": 2, "microbatches": 2, "ampipe_degree": 2}),
    (FEW, {"ep": 2, "dp": 4, "pp": 2, "microbatches": 2, "schedule": "zb-h2", "ampipe_degree": 3}),
    (ALL, {"ep": 2, "dp": 2, "microbatches": 2, "ampipe_degree": 4, **SLICES}),
    (DROPLESS, {"ep": 2, "dp": 2, "ampipe_degree": 6, "pipe_experts_multi_data": 4}),
    (ALL, {**PIPELINE, **SLICES, "overlap": "local", "split_ops": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "how"), CASES, ids=[str(how) for _, how in CASES])
def test_it_equals_the_plain_model(capacity: float | None, how: dict[str, Any]) -> None:
    model = model_of(capacity, shared=1)
    buffer = {} if capacity else {"ep_buffer": 4.0}
    expected = by_chunks(model, how["ampipe_degree"]) if capacity else None
    assert_equals(model, Parallel(**how, **buffer), expected=expected)


HEADS, WIDTH, LENGTH = 4, 8, 16


class Attention(nn.Module):
    """more: what attention is given; key_heads: fewer share keys (GQA)."""

    def __init__(self, more: dict[str, Any], key_heads: int, eager: bool) -> None:
        super().__init__()
        self.more, self.key_heads, self.eager = more, key_heads, eager
        self.query = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.pair = nn.Linear(HEADS * WIDTH, 2 * key_heads * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q = self.query(x).view(B, S, HEADS, WIDTH).transpose(1, 2)
        k, v = self.pair(x).view(B, S, self.key_heads, 2 * WIDTH).transpose(1, 2).chunk(2, dim=-1)
        more = dict(self.more)
        if self.eager:  # a sequence of heads that is repeated by hand, as `transformers` does
            more.pop("enable_gqa", None)
            k, v = (y.repeat_interleave(HEADS // self.key_heads, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, **more)
        made: Tensor = x + self.out(y.transpose(1, 2).reshape(B, S, HEADS * WIDTH))
        return made


class Block(nn.Module):
    def __init__(self, *attention: Any) -> None:
        super().__init__()
        self.attention = Attention(*attention)
        self.norm = nn.LayerNorm(HEADS * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(HEADS * WIDTH, 24), nn.GELU(), nn.Linear(24, HEADS * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        made: Tensor = x + self.mlp(self.norm(x))
        return made


class Model(nn.Module):
    def __init__(self, *attention: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*attention) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _window() -> Tensor:
    """A sliding window of five, as `transformers` gives it."""
    at = torch.arange(LENGTH)
    return (at[:, None] >= at) & (at[:, None] - at < 5)


ATTENTIONS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "causal": ({"is_causal": True}, HEADS, False),
    "whole": ({}, HEADS, False),
    "a scale": ({"is_causal": True, "scale": 0.2}, HEADS, False),
    "grouped heads": ({"is_causal": True, "enable_gqa": True}, 2, False),
    "heads repeated": ({"is_causal": True}, 2, True),
    "a sliding window": ({"attn_mask": _window()}, HEADS, False),
    "a bias": ({"attn_mask": torch.linspace(-1, 1, LENGTH).double().expand(LENGTH, LENGTH)}, HEADS, False),
    "a bias of heads": ({"attn_mask": torch.rand(1, HEADS, LENGTH, LENGTH).double()}, HEADS, False),
    "padding": ({"attn_mask": (torch.arange(LENGTH) < 11).view(1, 1, 1, LENGTH)}, HEADS, False),
    "padding of rows": ({"attn_mask": torch.rand(3, 1, LENGTH, LENGTH) > 0.2}, 1, True),
}


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_any_kind(name: str, degree: int) -> None:
    torch.manual_seed(0)
    model = Model(*ATTENTIONS[name]).double()
    x = torch.randn(3, LENGTH, HEADS * WIDTH, dtype=torch.float64)
    cut = copy.deepcopy(model)
    want = model(x)
    with ampipe(cut, Chunks(degree)):
        found = cut(x)
    assert torch.allclose(found, want, rtol=1e-10, atol=1e-12)
    for made in (want, found):
        made.square().sum().backward()
    for one, other in zip(model.parameters(), cut.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(other.grad, one.grad, rtol=1e-10, atol=1e-10)
