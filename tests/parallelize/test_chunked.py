"""A sequence in chunks as code sees it: any call gives what it gives of the full tensor, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.errors import CaptureError
from stretto.parallelize.ampipe import _ChunkedAttention
from stretto.parallelize.chunk_writes import views_noted
from stretto.parallelize.chunked import Chunked, joined
from stretto.parallelize.parts import lengths_of


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
        call(Chunked(torch.randn(2, 12, 8).double().split(4, dim=1), 1))
