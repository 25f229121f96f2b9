"""Any code on what is sharded is right: own attention, gates, numbers that it makes of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.program import Job
from tests.cells import slow
from tests.clusters import cores
from tests.parallelize.equality import assert_plain, assert_plan_is_plain

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")

Batch = dict[str, Tensor]


def square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"]).square().mean()


def batch_of(*shape: int) -> Batch:
    return {"x": torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def collectives(job: Job) -> list[str]:
    return [op.target for stage in job.stages for ops in stage.ops.values() for op in ops if op.collective]


class Attention(nn.Module):
    """Queries of several heads, keys and values of one, which `code` makes of the full tensor."""

    def __init__(self, hidden: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.d = hidden // heads
        self.q, self.both = nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * self.d)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        q = self.q(x).view(rows, tokens, -1, self.d).transpose(1, 2)
        k, v = self.both(x).split(self.d, dim=-1)
        weights = (torch.einsum("bhsd,btd->bhst", q, k) / self.d**0.5).softmax(-1)
        return self.out(torch.einsum("bhst,btd->bshd", weights, v).reshape(rows, tokens, -1))


@pytest.mark.parametrize(
    ("tp", "style"),
    [
        (2, None),
        (2, "colwise_gather_output"),
        slow(2, "replicated"),
        *(slow(4, style) for style in (None, "replicated", "colwise_gather_output")),
    ],
)
def test_keys_held_whole_beside_queries_that_are_spread(style: str | None, tp: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Attention()).double()
    plan = {"1.q": "colwise", "1.out": "rowwise", **({"1.both": style} if style else {})}
    job = capture(model, batch_of(2, 6, 16), square, Parallel(tp=tp), tp_plan=plan)
    proved = stretto.plan(job, cores(), order="list")
    assert_plan_is_plain(proved, model, square, batch_of(2, 6, 16))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.gate(x).mean(-1, keepdim=True))


@pytest.mark.parametrize("style", [None, "colwise_gather_output"])
def test_a_gate_beside_a_spread_value(style: str | None) -> None:
    torch.manual_seed(0)
    model = Gated().double()
    plan = {"up": "colwise", "down": "rowwise", **({"gate": style} if style else {})}
    job = capture(model, batch_of(4, 8), square, Parallel(tp=2), tp_plan=plan)
    assert_plain(job, model, square, batch_of(4, 8))


def test_an_mlp_has_the_collectives_of_its_styles_and_no_more() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    plan = {"1": "colwise", "3": "rowwise"}
    job = capture(model, batch_of(4, 8), square, Parallel(tp=2), tp_plan=plan)
    assert collectives(job) == ["comm.all_reduce"] * 2


class Coded(nn.Module):
    """Two matrices, and code between them."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.code = nn.Linear(8, 16), nn.Linear(16, 8), code

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.code(self, self.up(x)))


CODE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number of a shape": lambda m, x: x / x.shape[-1],
    "a root of a shape": lambda m, x: x * x.shape[-1] ** -0.5,
    "places by number": lambda m, x: x * torch.arange(x.shape[-1]),
    "a branch on a shape": lambda m, x: x if x.shape[-1] > 8 else x.relu(),
    "heads cut otherwise": lambda m, x: x.view(x.shape[0], 4, -1).softmax(-1).flatten(1),
    "a softmax": lambda m, x: x.softmax(-1),
    "a norm": lambda m, x: F.normalize(x, dim=-1),
    "a running sum": lambda m, x: x.cumsum(-1),
    "the order turned": lambda m, x: x.flip(-1),
    "a parameter of all features": lambda m, x: x * m.down.bias.repeat(2),
    "a total beside its parts": lambda m, x: x * x.sum(-1, keepdim=True),
    "columns by number": lambda m, x: torch.cat((x[:, :4], x[:, 4:]), 1),
    "ones of a part's size": lambda m, x: x * torch.ones(x.shape[-1], dtype=x.dtype),
    "in place": lambda m, x: x.mul_(0.5).add_(1.0),
    "heads": lambda m, x: x.view(x.shape[0], -1, 4).softmax(-1).flatten(1),
    "one element on a rank": lambda m, x: x.view(x.shape[0], -1, 8).softmax(-1).flatten(1),
}


@pytest.mark.parametrize("what", CODE)
def test_code_is_right(what: str) -> None:
    torch.manual_seed(0)
    model = Coded(CODE[what]).double()
    plan = {"up": "colwise", "down": "rowwise"}
    job = capture(model, batch_of(2, 8), square, Parallel(tp=2), tp_plan=plan)
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, square, batch_of(2, 8))


class Unweighted(nn.Module):
    """Experts that leave the weights of a token's experts to others, and a batch norm that is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.up.shape[0]):
            made = made + (chosen == expert).any(1, keepdim=True) * (tokens @ self.up[expert]).tanh()
        return made


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.BatchNorm1d(8), nn.Linear(8, 4), Unweighted()
        self.ep_plan = {"experts": "experts"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, chosen, weights) * weights.sum(-1, keepdim=True)


def test_experts_without_weights_behind_a_batch_norm_that_is_evaluated() -> None:
    torch.manual_seed(0)
    model = Mixture().double().eval()
    job = capture(model, batch_of(8, 8), square, Parallel(ep=2, dp=2, microbatches=2))
    assert_plan_is_plain(stretto.plan(job, cores(), order="list"), model, square, batch_of(8, 8))
