"""Blocks that work in chunks of their sequence: attention is that of the uncut model, whatever its mask, and
what cannot be cut is refused. (Steps of layouts with chunks are in the table of `test_experts`.)"""

from __future__ import annotations

import copy
import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, UsageError
from stretto.ir.plan import Plan
from stretto.models.gpt import GPT, GPTConfig, next_token_loss, next_token_sum
from stretto.models.moe import moe_token_sum
from stretto.parallelize.ampipe import Chunks, ampipe, blocks_of
from stretto.parallelize.chunk_attention import attention
from stretto.parallelize.chunked import Chunked, joined
from stretto.parallelize.parts import lengths_of
from stretto.price.cluster import Cluster
from tests.parallelize.equality import assert_plan_is_plain, batch_of, gpt, planned
from tests.parallelize.test_experts import FEW, batch, model_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "sequence", "pp"),
    [(2, False, 1), (3, True, 1), (2, True, 2), (4, True, 1), (3, False, 2)],
)
def test_dense_blocks_in_chunks(degree: int, sequence: bool, pp: int) -> None:
    model = gpt().double()
    parallel = Parallel(tp=2, pp=pp, microbatches=2, ampipe_degree=degree, sequence_parallel=sequence)
    job = capture(model, batch_of(), next_token_loss, parallel)
    assert_plan_is_plain(planned(job), model, next_token_loss, batch_of())


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


@pytest.mark.parametrize("degree", [2, 3])
def test_dropout_draws_for_a_token_what_it_draws_in_the_uncut_model(degree: int) -> None:
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=12, dropout=0.3)).double()
    found = []
    for n in (1, degree):
        own = copy.deepcopy(model)
        torch.manual_seed(3)
        with ampipe(own, Chunks(n)) if n > 1 else nullcontext():
            total, _ = next_token_sum(own, batch())
        total.backward()
        found.append((total.detach(), [p.grad for p in own.parameters()]))
    (want, grads), (loss, others) = found
    assert torch.allclose(loss, want, rtol=1e-12)
    for grad, other in zip(grads, others, strict=True):
        assert torch.allclose(other, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "more",
    [
        {"is_causal": True},
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": torch.randn(12, 12).double()},
        {"attn_mask": (torch.rand(2, 1, 12, 12) > 0.3).index_fill(2, torch.tensor([1, 7]), False)},
        {"attn_mask": torch.randn(2, 1, 1, 12).double()},
        {"enable_gqa": True, "is_causal": True},
        {},
    ],
    ids=lambda more: "-".join(more) or "plain",
)
def test_attention_drops_what_the_uncut_one_drops(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = 1 if "enable_gqa" in more else 4
    q = torch.randn(2, 4, 12, 8).double().requires_grad_()
    k, v = (torch.randn(2, heads, 12, 8).double().requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, **more)
    torch.manual_seed(1)
    found = attention(q, k, v, dropout_p=0.4, lengths=lengths_of(12, 5), **more)
    assert type(found) is Chunked
    assert torch.allclose(found.joined(), want, rtol=1e-10)
    weight = torch.randn_like(want)
    for grad, other in zip(
        *(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (want, found.joined())), strict=True
    ):
        assert torch.allclose(other, grad, rtol=1e-10, atol=1e-12)


def test_a_mask_beside_a_causal_one_is_what_it_is_in_the_uncut_model() -> None:
    """PyTorch takes both in some kernels, and refuses them in others."""
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3:, 1] = False
    for dropout in (0.0, 0.4):
        try:
            want = F.scaled_dot_product_attention(q, k, v, mask, dropout, True)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                attention(q, k, v, mask, dropout, True, lengths=[4, 4])
        else:
            assert torch.equal(attention(q, k, v, mask, dropout, True, lengths=[4, 4]), want)


def test_a_kernel_that_drops_by_itself_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=12, dropout=0.3))
    with pytest.raises(CaptureError, match=r"drops with p = 0.3, and its kernel on CUDA draws"):
        capture(model, batch(), next_token_sum, Parallel(ampipe_degree=2), device="cuda")


def test_masks_are_cut_with_their_queries() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 12, 4).double() for _ in range(3))
    cut = Chunked(q.split(lengths_of(12, 3), dim=2), 2)
    for more in (
        {"is_causal": True},
        {},
        {"attn_mask": torch.randn(12, 12).double()},
        {"attn_mask": torch.rand(2, 1, 12, 12) > 0.3},
        {"attn_mask": torch.randn(2, 1, 1, 12).double()},
    ):
        found = attention(cut, k, v, **more)
        assert type(found) is Chunked
        assert torch.allclose(joined(found), F.scaled_dot_product_attention(q, k, v, **more))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UsageError, match="no ModuleList of blocks"):
        blocks_of(nn.Linear(2, 2))


def test_attention_that_cannot_be_cut_is_refused() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.blocks[0](x)
            return made

    with pytest.raises(UsageError, match="which no block of Mixer calls"):
        capture(Mixer(), torch.zeros(4, 6, 8), lambda m, x: m(x).sum(), Parallel(ampipe_degree=2))


def test_auto_takes_what_is_predicted_to_be_the_fastest() -> None:
    job = capture(model_of(FEW), batch(), moe_token_sum, Parallel(ep=2, dp=2, ampipe_degree="auto"))
    assert [one.chunks for one in (job, *job.forms)] == [1, 2, 4]

    def planned(link: float) -> Plan:
        cluster = Cluster(latency_us=1.0, link_bytes_per_us=link, op_overhead_us=1.0)
        return stretto.plan(job, cluster)

    cheap, dear = planned(1e6), planned(1.0)
    assert cheap.job.chunks == 1
    # What cannot win by its bound is not planned.
    told = r"1 chunk of the sequence, [\d.]+ ms, as 2 take (at least )?[\d.]+ ms, 4 take at least [\d.]+ ms$"
    assert re.search(told, cheap.overlap_why), cheap.overlap_why
    assert dear.job.chunks > 1
    assert not dear.job.forms
    told = rf"{dear.job.chunks} chunks of the sequence, [\d.]+ ms, as 1 takes [\d.]+ ms, "
    assert re.search(told, dear.overlap_why), dear.overlap_why


def test_auto_says_that_it_cuts_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="cuts nothing"):
        job = capture(model, torch.zeros(4, 4), lambda m, x: m(x).sum(), Parallel(ampipe_degree="auto"))
    assert job.forms == ()


@pytest.mark.parametrize("degree", [0, -1, "2", True, 1.5])
def test_what_is_no_degree_is_refused(degree: Any) -> None:
    with pytest.raises(UsageError, match="is neither 'auto' nor a number of chunks"):
        Parallel(ampipe_degree=degree)


def test_masks_of_fewer_keys_than_queries() -> None:
    q, k = torch.randn(1, 2, 8, 4).double(), torch.randn(1, 2, 3, 4).double()
    found = attention(Chunked(q.split(4, dim=2), 2), k, k, is_causal=True)
    want = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert torch.allclose(joined(found), want)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class OwnFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
        return made


def test_functions_of_ones_own_are_given_the_whole() -> None:
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=12)).double()
    model.blocks[0].mlp = nn.Sequential(model.blocks[0].mlp, OwnFunction())
    grads = []
    for degree in (1, 2):
        own = copy.deepcopy(model)
        with ampipe(own, Chunks(degree)) if degree > 1 else nullcontext():
            next_token_sum(own, batch())[0].backward()
        grads.append([p.grad for p in own.parameters()])
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_calls_by_keyword_are_known() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])
            self.blocks[0].forward = self._mix  # type: ignore[method-assign]

        def _mix(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query=x, key=x, value=x)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.blocks[0](x)
            return made

    x = torch.randn(1, 2, 12, 8).double()
    model = Named()
    with ampipe(model, Chunks(2)):
        assert torch.allclose(model(x), F.scaled_dot_product_attention(x, x, x))


def test_later_chunks_have_flash_attention_on_cuda() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=12))
    how = Parallel(ampipe_degree=3)
    job = capture(model, batch(), next_token_sum, how, precision="bf16", device="cuda")
    targets = Counter(op.target for stage in job.stages for ops in stage.ops.values() for op in ops)
    flash = "aten._scaled_dot_product_flash_attention"
    assert targets[f"{flash}.default"] == targets[f"{flash}_backward.default"] == 3 * 2
    assert not any("efficient_attention" in target for target in targets)
