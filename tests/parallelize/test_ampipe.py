"""Blocks that work in chunks of their sequence: the step is that of the uncut model, and chunks are
independent."""

from __future__ import annotations

import copy
import functools
import itertools
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
from stretto.models.moe import moe_token_sum
from stretto.parallelize.ampipe import Chunks, _ChunkedAttention, ampipe, blocks_of
from stretto.parallelize.chunk_attention import attention
from stretto.parallelize.chunk_writes import views_noted
from stretto.parallelize.chunked import Chunked, joined
from stretto.parallelize.parts import lengths_of
from stretto.price.cluster import Cluster
from tests.parallelize.test_experts import DROPLESS, FEW, assert_equals, batch, model_of


def by_chunks(model: nn.Module, degree: int) -> nn.Module:
    """The plain model with experts that serve each chunk of a sequence by itself, written out."""
    own = copy.deepcopy(model)
    for module in own.modules():
        if type(module).__name__ == "Experts":
            module.forward = functools.partial(_each_chunk, module.forward, degree)  # type: ignore[method-assign]
    return own


def _each_chunk(forward: Any, degree: int, *rows: Tensor) -> Tensor:
    length = batch().shape[1] - 1
    parts = [x.view(-1, length, x.shape[-1]).split(lengths_of(length, degree), dim=1) for x in rows]
    made = [forward(*(p.flatten(0, 1) for p in chunk)) for chunk in zip(*parts, strict=True)]
    whole = [m.view(-1, n, m.shape[-1]) for m, n in zip(made, lengths_of(length, degree), strict=True)]
    return torch.cat(whole, dim=1).flatten(0, 1)


EP, PP = {"ep": 2, "dp": 2, "ep_buffer": 4.0}, {"pp": 2, "microbatches": 2}
FAST = ((EP, FEW, 2), (PP, DROPLESS, 3))
"""Each of the three in one of its forms at least; both layouts with both capacities in the longer run."""


@pytest.mark.parametrize(
    ("how", "capacity", "degree"),
    [
        pytest.param(*cell, marks=[] if cell in FAST else [pytest.mark.slow])
        for cell in itertools.product((EP, PP), (DROPLESS, FEW), (2, 3, 4, 6))
    ],
)
def test_the_whole_sequence_is_that_of_the_uncut_model(degree: int, capacity: float | None, how: Any) -> None:
    parallel = Parallel(**how, ampipe_degree=degree, ampipe_capacity="whole")
    assert_equals(model_of(capacity, shared=1), parallel)


@pytest.mark.parametrize("degree", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_capacities_of_chunks_are_those_of_a_plain_model_by_chunks(degree: int) -> None:
    model = model_of(FEW, shared=1, dense_every=2)
    parallel = Parallel(ep=2, dp=2, ampipe_degree=degree)
    assert_equals(model, parallel, expected=by_chunks(model, degree))


@pytest.mark.parametrize(
    "more",
    [
        {"schedule": "zb-h1", "recompute": "full", "microbatches": 2},
        pytest.param({"schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_goes_with_all_else(more: dict[str, Any]) -> None:
    parallel = Parallel(ep=2, dp=2, pp=2, ampipe_degree=2, **{"microbatches": 4, **more})
    assert_equals(model_of(DROPLESS, shared=1), parallel.model_copy(update={"ep_buffer": 4.0}))


def test_each_chunk_has_collectives_and_products_of_its_own() -> None:
    def targets(degree: int) -> Counter[str]:
        how = Parallel(ep=2, dp=2, ampipe_degree=degree)
        job = capture(model_of(FEW, shared=1), batch(), moe_token_sum, how)
        return Counter(op.target for stage in job.stages for ops in stage.ops.values() for op in ops)

    one, three = targets(1), targets(3)
    assert three["comm.all_to_all"] == 3 * one["comm.all_to_all"]
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert three[attention] == 3 * one[attention]


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


def _written(x: Tensor) -> Tensor:
    """As DeepSeek-V3 puts its keys together."""
    made = x.new_empty(2, 12, 8)
    made[..., :3] = x[..., 5:]
    made[..., 3:] = x[..., :5]
    return made


def _seen(x: Tensor) -> Tensor:
    x.view(24, 8).mul_(2.0)
    return x


def _divided(x: Tensor) -> Tensor:
    x /= x.square().sum(dim=-1, keepdim=True)
    return x


def _token(x: Tensor) -> Tensor:
    x[:, 5] = 1.0
    return x


CALLS = {
    "sum over positions": lambda x: x.sum(dim=1),
    "sum over features": lambda x: x.sum(dim=-1),
    "softmax over positions": lambda x: x.softmax(dim=1),
    "softmax over features": lambda x: x.softmax(dim=-1),
    "cumsum": lambda x: x.cumsum(dim=1),
    "flip": lambda x: x.flip(1),
    "rows": lambda x: x.flatten(0, 1) @ torch.ones(8, 3, dtype=x.dtype),
    "rows and back": lambda x: (x.reshape(-1, 8) * 2).view(x.shape),
    "heads": lambda x: x.view(*x.shape[:2], 2, 4).transpose(1, 2),
    "beside a whole": lambda x: x + torch.arange(12.0, dtype=x.dtype)[:, None],
    "square beside": lambda x: F.linear(x, torch.arange(64.0, dtype=x.dtype).view(8, 8)),
    "mean": lambda x: x.mean(),
    "norm": lambda x: F.layer_norm(x, (8,)),
    "positions mixed": lambda x: torch.arange(144.0, dtype=x.dtype).view(12, 12) @ x,
    "a token": lambda x: x[:, 3],
    "tokens": lambda x: x[:, 2:9] * 2,
    "a feature": lambda x: x[..., 3],
    "in place": lambda x: x.clone().mul_(2.0) + x,
    "expanded": lambda x: x.unsqueeze(1).expand(2, 3, 12, 8),
    "rows expanded": lambda x: x.flatten(0, 1).unsqueeze(1).expand(-1, 3, 8),
    "rows in pairs": lambda x: x.reshape(-1, 2, 8),
    "written in parts": _written,
    "added in place to a whole": lambda x: torch.ones(2, 12, 8, dtype=x.dtype).add_(x),
    "views see what is written": lambda x: _seen(x.clone()),
    "divided": lambda x: _divided(x.clone()),
    "a token written": lambda x: _token(x.clone()),
    "scattered": lambda x: torch.zeros_like(x).scatter_(-1, x.topk(2, dim=-1).indices, 1.0),
    "split": lambda x: torch.cat(x.split([3, 5], dim=-1)[::-1], dim=-1),
    "scores": lambda x: torch.einsum("bsd,btd->bst", x, x).softmax(-1) @ x,
    "scores of heads": lambda x: torch.einsum("bqhd,bkhd->bhqk", *2 * [x.view(2, 12, 2, 4)]).softmax(-1),
    "summed over positions by einsum": lambda x: torch.einsum("bsd,bse->bde", x, x),
    "windows": lambda x: x.unflatten(1, (-1, 4)).softmax(2).flatten(1, 2),
    "halves": lambda x: x.unflatten(1, (2, -1)).cumsum(1),
    "rows of fours": lambda x: x.flatten(0, 1).unflatten(0, (-1, 4)).sum(0),
    "viewed in parts": lambda x: x.view(2, 3, 4, 8).softmax(2),
    "normed over neighbours": lambda x: F.local_response_norm(x, 3),
    "pooled": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 3),
    "pooled by two": lambda x: F.max_pool1d(x.transpose(1, 2), 2),
    "padded around": lambda x: F.pad(x.transpose(1, 2), (1, 1), mode="circular"),
    "median": lambda x: x.quantile(0.5, dim=1),
    "turned": lambda x: x.mT @ x,
    "another dtype": lambda x: x.float() * 2,
    "equal": lambda x: torch.tensor(float(torch.equal(x, x * 1))),
    "dropped": lambda x: (torch.manual_seed(3), F.dropout(x, 0.5))[1],
    "dropped in place": lambda x: (torch.manual_seed(3), y := x.clone(), F.dropout(y, 0.5, inplace=True), y)[
        -1
    ],
    "an activation in place": lambda x: (y := x.clone(), F.relu(y, inplace=True), y)[-1] + x,
    "by keyword": lambda x: (y := x.clone(), F.hardtanh(input=y, inplace=True), y)[-1],
    "by place": lambda x: (y := x.clone(), F.leaky_relu(y, 0.3, True), y)[-1],
    "of a view": lambda x: (y := x.clone(), F.silu(y.view(2, 12, 2, 4), True), y)[-1],
    "topk": lambda x: x.topk(2, dim=-1).indices,
    "long as features": lambda x: x * torch.arange(8.0, dtype=x.dtype),
    "zeros like": lambda x: torch.zeros_like(x) + x,
    "where": lambda x: torch.where(x > 0, x, torch.zeros((), dtype=x.dtype)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("degree", [2, 5])
def test_any_call_gives_what_it_gives_of_the_whole(name: str, degree: int) -> None:
    whole = torch.randn(2, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cut = Chunked(whole.split(lengths_of(12, degree), dim=1), 1)
    found = joined(CALLS[name](cut))
    assert torch.allclose(found.double(), CALLS[name](whole).double(), rtol=1e-12)


def test_gradients_of_what_is_made_in_place() -> None:
    def made(x: Any, of: Tensor) -> list[Tensor]:
        y = x * 2.0
        F.silu(y, inplace=True)
        return list(torch.autograd.grad((joined(y) * torch.arange(8.0)).square().sum(), of))

    whole = torch.randn(2, 12, 8, dtype=torch.float64).requires_grad_()
    [expected] = made(whole, whole)
    [found] = made(Chunked(whole.split(lengths_of(12, 5), dim=1), 1), whole)
    assert torch.allclose(found, expected, rtol=1e-12)


def test_a_sequence_is_not_turned_in_place() -> None:
    with pytest.raises(CaptureError, match="changed in place to"):
        Chunked(torch.randn(2, 12, 8).split(4, dim=1), 1).transpose_(1, 2)


@pytest.mark.parametrize(
    "name",
    [
        "rows",
        "rows and back",
        "heads",
        "beside a whole",
        "norm",
        "topk",
        "a feature",
        "an activation in place",
    ],
)
def test_what_can_stay_in_chunks_does(name: str) -> None:
    cut = Chunked(torch.randn(2, 12, 8).double().split(4, dim=1), 1)
    assert type(CALLS[name](cut)) is Chunked


def test_a_square_matrix_beside_a_sequence_as_long_is_not_cut() -> None:
    whole = torch.randn(2, 8, 8).double()
    weight = torch.randn(8, 8).double()
    cut = Chunked(whole.split(4, dim=1), 1)
    assert torch.allclose(joined(F.linear(cut, weight)), F.linear(whole, weight))
    assert torch.allclose(joined(cut @ weight), whole @ weight)
    assert torch.allclose(joined(weight @ cut), weight @ whole)
    assert torch.allclose(joined(cut * weight), whole * weight)


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


def test_too_many_chunks_are_refused_with_what_works() -> None:
    with pytest.raises(CaptureError, match="give 6 or less"):
        capture(model_of(FEW), batch(), moe_token_sum, Parallel(ampipe_degree=7))


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


def cut() -> Chunked:
    return Chunked(torch.randn(2, 12, 8).double().split(4, dim=1), 1)


def test_masks_of_fewer_keys_than_queries() -> None:
    q, k = torch.randn(1, 2, 8, 4).double(), torch.randn(1, 2, 3, 4).double()
    found = attention(Chunked(q.split(4, dim=2), 2), k, k, is_causal=True)
    want = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert torch.allclose(joined(found), want)


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
