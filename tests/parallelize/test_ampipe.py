"""Blocks that work in chunks of their sequence: the step is that of the uncut model, and chunks are
independent."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, UsageError
from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Op
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from tests.cells import slow
from tests.clusters import cores
from tests.parallelize.equality import assert_plan_is_plain, batch_of, small, step_of
from tests.parallelize.mixtures import FEW, batch, captured, model_of, planned
from tests.runtime.equality import huggingface_loss


def planned_step(model: nn.Module, loss: Any, given: Any, degree: int) -> tuple[Tensor, dict[str, Tensor]]:
    return step_of(planned(capture(model, given, loss, Parallel(ampipe_degree=degree))), model, given)


def assert_draws_the_same(model: nn.Module, loss: Any, given: Any, degree: int) -> None:
    """A planned step draws, and its numbers do not depend on the number of chunks."""
    (want, grads), (found, others) = (planned_step(model, loss, given, n) for n in (1, degree))
    assert torch.allclose(found, want, rtol=1e-12)
    for name, grad in grads.items():
        assert torch.allclose(others[name], grad, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("degree", [2, slow(5)])
def test_dropout_draws_for_a_token_what_it_draws_in_the_uncut_model(degree: int) -> None:
    model = GPT(GPTConfig(vocab_size=32, layers=2, hidden=16, heads=2, context=12, dropout=0.3)).double()
    assert_draws_the_same(model, next_token_sum, batch(), degree)


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


class Attention(nn.Module):
    """A block: attention that is given what `ATTENTIONS` says, added to the stream."""

    def __init__(self, heads: int, dropout: float, given: dict[str, Any]) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32)
        self.kv = nn.Linear(32, 2 * heads * 8)
        self.dropout = dropout
        self.given = {key: value for key, value in given.items() if key != "attn_mask"}
        self.register_buffer("mask", given.get("attn_mask"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (self.q(x), *self.kv(x).chunk(2, -1)))
        made = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, dropout_p=self.dropout, **self.given
        )
        return x + made.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Ids (2, 12) to a number, by blocks of any kind."""

    def __init__(self, *blocks: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


IDS = torch.randint(0, 16, (2, 12), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids)  # type: ignore[no-any-return]


def ops_of(model: nn.Module, degree: int) -> list[Op]:
    job = capture(model, IDS, loss_of, Parallel(ampipe_degree=degree))
    return [op for stage in job.stages for ops in stage.ops.values() for op in ops]


def assert_equal_in_chunks(model: nn.Module, degree: int) -> None:
    job = capture(model, IDS, loss_of, Parallel(ampipe_degree=degree))
    # A bias before a softmax over positions has a gradient of nothing but rounding.
    assert_plan_is_plain(planned(job), model, loss_of, IDS, least=1e-6)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_is_that_of_the_uncut_one(name: str) -> None:
    heads, more = ATTENTIONS[name]
    torch.manual_seed(0)
    model = Model(Attention(heads, 0.0, more), Attention(heads, 0.0, more)).double()
    assert_equal_in_chunks(model, 5)
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    one, cut = (sum(op.target == kernel for op in ops_of(model, n)) for n in (1, 5))
    assert cut == 5 * one


def test_chunks_begin_with_queries_of_the_first_attention() -> None:
    """What makes them is of all tokens at once, forward and backward."""
    model = Model(Attention(4, 0.0, {}), Attention(4, 0.0, {})).double()

    def products(block: int) -> int:
        maker = f"blocks.{block}.q"
        return sum(bool(op.flops) and op.module == maker for op in ops_of(model, 3))

    assert (products(0), products(1)) == (3, 3 * 3)


@pytest.mark.parametrize("name", ["causal", *(slow(name) for name in ATTENTIONS if name != "causal")])
def test_attention_draws_what_it_draws_in_the_uncut_model(name: str) -> None:
    heads, more = ATTENTIONS[name]
    torch.manual_seed(0)
    assert_draws_the_same(Model(Attention(heads, 0.4, more)).double(), loss_of, IDS, 5)


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
    made = x.clone()
    made /= x.square().sum(dim=-1, keepdim=True)
    return made


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
    "divided": _divided,
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


def _zeroed(x: Tensor) -> Tensor:
    x[:, 0].zero_()
    return x


def _written_through(x: Tensor) -> Tensor:
    rows, first = x.view(24, 8), x[:, 0]
    rows.mul_(2)
    return x + first.unsqueeze(1)


CALLS |= {
    "a token zeroed": lambda x: _zeroed(x.clone()),
    "written by a view": lambda x: _written_through(x.clone()),
    "a part of a token zeroed": lambda x: (y := x.clone(), y[:, 0][:, 2:].zero_(), y)[0],
    "transposed in place": lambda x: x.clone().transpose_(1, 2).cumsum(dim=2),
    "a function of one's own": lambda x: Doubled.apply(x),  # type: ignore[no-untyped-call]
}
"""Whatever code does to the stream: it is traced uncut, and chunks are of its ops."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class Called(nn.Module):
    """A block that makes a call of the stream, and adds what comes of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = CALLS[self.name](self.linear(x)).to(x.dtype)
        return x + (made if made.shape == x.shape else made.sin().mean())


FEW_CALLS = ("softmax over positions", "cumsum", "rows", "heads", "a token written", "windows", "topk")


@pytest.mark.parametrize("name", [name if name in FEW_CALLS else slow(name) for name in CALLS])
@pytest.mark.parametrize("degree", [slow(2), 5])
def test_any_call_gives_what_it_gives_of_the_whole(name: str, degree: int) -> None:
    torch.manual_seed(0)
    model = Model(Called(name), Called(name), width=8).double()
    if name == "dropped":
        assert_draws_the_same(model, loss_of, IDS, degree)
    else:
        assert_equal_in_chunks(model, degree)


STAY = {"rows": "sin", "heads": "sin", "norm": "native_layer_norm", "topk": "topk", "a feature": "sin"}
"""Calls that stay in chunks, and an op of which each chunk has its own."""


@pytest.mark.parametrize("name", STAY)
def test_what_is_of_tokens_alone_is_of_a_chunk(name: str) -> None:
    one, cut = (
        sum(op.target.startswith(f"aten.{STAY[name]}.") for op in ops_of(Model(Called(name), width=8), n))
        for n in (1, 3)
    )
    assert cut == 3 * one > 0


def test_attention_of_plain_ops_is_cut_by_its_rules() -> None:
    """It calls no kernel of PyTorch's."""
    pytest.importorskip("transformers")
    model = small("LlamaForCausalLM", attn_implementation="eager").double()
    job = capture(model, batch_of(), huggingface_loss, Parallel(ampipe_degree=2))
    assert_plan_is_plain(planned(job), model, huggingface_loss, batch_of(), 1e-6)
    softmax = [
        op for stage in job.stages for op in stage.ops[Phase.F] if op.target == "aten._softmax.default"
    ]
    assert len(softmax) == 2 * 2


def test_a_sequence_that_nothing_makes_is_refused() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.blocks[0](x)
            return made

    with pytest.raises(UsageError, match=r"enters blocks.0, which reads no activation"):
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
