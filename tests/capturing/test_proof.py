"""What styles propose and the proof completes or refuses: own attention, gates, numbers of parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError
from stretto.ir.program import Job
from tests.cells import slow
from tests.parallelize.equality import assert_plain

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
    assert_plain(job, model, square, batch_of(2, 6, 16))


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


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a number of a shape": (lambda m, x: x / x.shape[-1], "in the model or the loss is called with 8, where"),
    "a root of a shape": (lambda m, x: x * x.shape[-1] ** -0.5, "the number comes from the shape"),
    "places counted by a part": (
        lambda m, x: x * torch.arange(x.shape[-1]),
        "'arange' in the model or the loss is called with 8, where the model alone calls it with 16",
    ),
    "a branch on a shape": (lambda m, x: x if x.shape[-1] > 8 else x.relu(), "where it calls"),
    "heads cut otherwise": (
        lambda m, x: x.view(x.shape[0], 4, -1).softmax(-1).flatten(1),
        "makes a tensor of shape [2, 4, 4] in the model alone, and [2, 4, 2] on each of 2 tp ranks",
    ),
    "a softmax": (lambda m, x: x.softmax(-1), "(_softmax, aten._softmax.default)"),
    "a norm": (lambda m, x: F.normalize(x, dim=-1), "needs all of that dim"),
    "a running sum": (lambda m, x: x.cumsum(-1), "needs all of that dim"),
    "the order turned": (lambda m, x: x.flip(-1), "needs all of that dim"),
    "a parameter of all features": (lambda m, x: x * m.down.bias.repeat(2), "cannot capture Coded"),
    "a total beside its parts": (
        lambda m, x: x * x.sum(-1, keepdim=True),
        "is a partial sum of a sum on every rank",
    ),
    "columns by number": (
        lambda m, x: torch.cat((x[:, :4], x[:, 4:]), 1),
        "and the op needs all of that dim",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_code_that_looks_at_what_is_spread_is_refused_or_right(what: str) -> None:
    code, message = REFUSED[what]
    torch.manual_seed(0)
    model = Coded(code).double()
    plan = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(CaptureError) as caught:
        capture(model, batch_of(2, 8), square, Parallel(tp=2), tp_plan=plan)
    assert message in " ".join(str(caught.value).split())


RIGHT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "ones of a part's size": lambda m, x: x * torch.ones(x.shape[-1], dtype=x.dtype),
    "in place": lambda m, x: x.mul_(0.5).add_(1.0),
    "heads": lambda m, x: x.view(x.shape[0], -1, 4).softmax(-1).flatten(1),
    "one element on a rank": lambda m, x: x.view(x.shape[0], -1, 8).softmax(-1).flatten(1),
}


@pytest.mark.parametrize("what", RIGHT)
def test_code_that_is_right_on_parts(what: str) -> None:
    torch.manual_seed(0)
    model = Coded(RIGHT[what]).double()
    plan = {"up": "colwise", "down": "rowwise"}
    job = capture(model, batch_of(2, 8), square, Parallel(tp=2), tp_plan=plan)
    assert_plain(job, model, square, batch_of(2, 8))
