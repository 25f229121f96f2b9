"""Blocks that work in chunks of their sequence: the step is that of the uncut model, and chunks are
independent."""

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
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from stretto.parallelize.ampipe import Chunks, _ChunkedAttention, ampipe, attention
from stretto.parallelize.chunked import Chunked, joined, views_noted
from stretto.parallelize.parts import lengths_of
from tests.clusters import cores
from tests.parallelize.mixtures import FEW, batch, captured, model_of


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


def window() -> Tensor:
    """A sliding window of five, as `transformers` gives it."""
    at = torch.arange(12)
    return (at[:, None] >= at) & (at[:, None] - at < 5)


ATTENTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "full": (4, {}),
    "causal": (4, {"is_causal": True}),
    "a scale": (4, {"is_causal": True, "scale": 0.3}),
    "grouped heads": (2, {"is_causal": True, "enable_gqa": True}),
    "a sliding window": (4, {"attn_mask": window()}),
    "a bias": (4, {"attn_mask": torch.randn(12, 12).double()}),
    "a bias of heads": (4, {"attn_mask": torch.randn(1, 4, 12, 12).double()}),
    "padding": (4, {"attn_mask": torch.randn(2, 1, 1, 12).double()}),
    "rows of no key": (
        4,
        {"attn_mask": (torch.arange(12) % 7 != 1).view(12, 1).expand(12, 12)},
    ),
}
"""Heads of keys, and what attention is given."""


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_that_of_the_uncut_one(name: str, dropout: float) -> None:
    """And draws for a token what it draws there."""
    heads, more = ATTENTIONS[name]
    torch.manual_seed(0)
    q = torch.randn(2, 4, 12, 8).double().requires_grad_()
    k, v = (torch.randn(2, heads, 12, 8).double().requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    want = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **more)
    torch.manual_seed(1)
    chunks = attention(q, k, v, dropout_p=dropout, lengths=lengths_of(12, 5), **more)
    assert type(chunks) is Chunked
    found = chunks.joined()
    assert torch.allclose(found, want, rtol=1e-10, equal_nan=True)
    weight = torch.randn_like(want)
    grads = (torch.autograd.grad((x * weight).nansum(), (q, k, v)) for x in (want, found))
    for grad, other in zip(*grads, strict=True):
        assert torch.allclose(other, grad, rtol=1e-10, atol=1e-12, equal_nan=True)


def test_a_kernel_that_drops_by_itself_is_refused() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=12, dropout=0.3))
    with pytest.raises(CaptureError, match=r"drops with p = 0.3, and its kernel on CUDA draws"):
        capture(model, batch(), next_token_sum, Parallel(ampipe_degree=2), device="cuda")


def _written(x: Tensor) -> Tensor:
    """As DeepSeek-V3 puts its keys together."""
    made = x.new_empty(2, 12, 8)
    made[..., :3] = x[..., 5:]
    made[..., 3:] = x[..., :5]
    return made


def _divided(x: Tensor) -> Tensor:
    x /= x.square().sum(dim=-1, keepdim=True)
    return x


def _token(x: Tensor) -> Tensor:
    x[:, 5] = 1.0
    return x


CALLS = {
    "sum over positions": lambda x: x.sum(dim=1),
    "softmax over positions": lambda x: x.softmax(dim=1),
    "cumsum": lambda x: x.cumsum(dim=1),
    "rows": lambda x: x.flatten(0, 1) @ torch.ones(8, 3, dtype=x.dtype),
    "heads": lambda x: x.view(*x.shape[:2], 2, 4).transpose(1, 2),
    "beside a whole": lambda x: x + torch.arange(12.0, dtype=x.dtype)[:, None],
    "mean": lambda x: x.mean(),
    "norm": lambda x: F.layer_norm(x, (8,)),
    "a token": lambda x: x[:, 3],
    "a feature": lambda x: x[..., 3],
    "in place": lambda x: x.clone().mul_(2.0) + x,
    "expanded": lambda x: x.unsqueeze(1).expand(2, 3, 12, 8),
    "written in parts": _written,
    "divided": lambda x: _divided(x.clone()),
    "a token written": lambda x: _token(x.clone()),
    "scattered": lambda x: torch.zeros_like(x).scatter_(-1, x.topk(2, dim=-1).indices, 1.0),
    "split": lambda x: torch.cat(x.split([3, 5], dim=-1)[::-1], dim=-1),
    "scores": lambda x: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x,
    "summed over positions by einsum": lambda x: torch.einsum("bsd,bse->bde", x, x),
    "windows": lambda x: x.unflatten(1, (-1, 4)).softmax(2).flatten(1, 2),
    "pooled": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 3),
    "another dtype": lambda x: x.float() * 2,
    "dropped": lambda x: (torch.manual_seed(3), F.dropout(x, 0.5))[1],
    "an activation in place": lambda x: (y := x.clone(), F.relu(y, inplace=True), y)[-1] + x,
    "by keyword": lambda x: (y := x.clone(), F.hardtanh(input=y, inplace=True), y)[-1],
    "topk": lambda x: x.topk(2, dim=-1).indices,
    "zeros like": lambda x: torch.zeros_like(x) + x,
}


STAY = ("rows", "heads", "beside a whole", "norm", "topk", "a feature", "an activation in place")
"""Those whose result stays in chunks."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("degree", [2, 5])
def test_any_call_gives_what_it_gives_of_the_whole(name: str, degree: int) -> None:
    full = torch.randn(2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cut = Chunked(full.split(lengths_of(12, degree), dim=1), 1)
    made = CALLS[name](cut)
    found = joined(made)
    assert type(made) is Chunked or name not in STAY
    assert torch.allclose(found.double(), CALLS[name](full).double(), rtol=1e-12)


def test_gradients_of_what_is_made_in_place() -> None:
    def made(x: Any, of: Tensor) -> list[Tensor]:
        y = x * 2.0
        F.silu(y, inplace=True)
        return list(torch.autograd.grad((joined(y) * torch.arange(8.0)).square().sum(), of))

    full = torch.randn(2, 12, 8, dtype=torch.float64).requires_grad_()
    [expected] = made(full, full)
    [found] = made(Chunked(full.split(lengths_of(12, 5), dim=1), 1), full)
    assert torch.allclose(found, expected, rtol=1e-12)


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
    job = captured(model_of(FEW, layers=1), ep=2, dp=2, ampipe_degree="auto")
    assert [one.chunks for one in (job, *job.forms)] == [1, 2, 4]

    def planned(link: float) -> Plan:
        cluster = cores(latency_us=1.0, link_gbps=link / 1000, op_overhead_us=1.0)
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


def cut() -> Chunked:
    return Chunked(torch.randn(2, 12, 8).double().split(4, dim=1), 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, 0].zero_(),
        lambda x: (x[:, 0], x.add_(1)),
        lambda x: x.select(1, 0).add_(1),
        lambda x: x[:, 0][:, 2:].zero_(),
        lambda x: (own := x.clone(), y := own.view(24, 8), own[:, 0], y.mul_(2)),
        lambda x: x.register_hook(lambda g: g),
        lambda x: torch.mul(x, 2, out=torch.empty(2, 12, 8).double()),
        lambda x: x.requires_grad_(),
        lambda x: x.transpose_(1, 2),
    ],
)
def test_what_the_whole_would_share_is_refused(call: Any) -> None:
    with pytest.raises(CaptureError, match="in chunks"), views_noted(), _ChunkedAttention(3):
        call(cut())


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


def test_later_chunks_have_flash_attention_on_cuda() -> None:
    """Every chunk has a fused kernel: the first that of PyTorch's choice, which on some devices is cuDNN's;
    later ones, whose mask is causal from the lower right, flash attention itself."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32, layers=1, hidden=16, heads=2, context=12))
    how = Parallel(ampipe_degree=3)
    job = capture(model, batch(), next_token_sum, how, precision="bf16", device="cuda")
    targets = Counter(op.target for stage in job.stages for ops in stage.ops.values() for op in ops)
    for backward in ("", "_backward"):
        flash, cudnn = (
            targets[f"aten._scaled_dot_product_{kernel}_attention{backward}.default"]
            for kernel in ("flash", "cudnn")
        )
        assert flash >= 2
        assert flash + cudnn == 3
    assert not any("efficient_attention" in target for target in targets)
