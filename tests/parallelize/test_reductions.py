"""Reductions along features that ranks share: each rank reduces its own, and a few numbers are exchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto import Parallel, capture
from tests.parallelize.equality import assert_plain

Reduction = Callable[[Tensor], Tensor]
"""Of features (4, 12) a loss."""

REDUCTIONS: dict[str, Reduction] = {
    "highest of all": lambda h: h / h.abs().amax(),
    "highest of all, as max": lambda h: h * h.max(),
    "lowest of all": lambda h: h * h.min(),
    "lowest of a row": lambda h: h - h.amin(-1, keepdim=True),
    "lowest of rows and columns": lambda h: h * h.amin((0, 1)),
    "norm of all": lambda h: h / h.norm(),
    "norm of a row": lambda h: h / h.norm(dim=-1, keepdim=True),
    "sum of sizes": lambda h: torch.linalg.vector_norm(h, 1, -1),
    "greatest size": lambda h: h * torch.linalg.vector_norm(h, float("inf")),
    "mean of sizes": lambda h: h / h.detach().abs().mean(),
    "mean of a row": lambda h: (h - h.mean(-1, keepdim=True)) ** 3,
    "log-sum-exp": lambda h: h.logsumexp(-1),
    "log-sum-exp of all": lambda h: torch.logsumexp(h, (0, 1), keepdim=True),
    "log-sum-exp where some are hidden": lambda h: h.masked_fill(h > 0, float("-inf")).logsumexp(-1).exp(),
    "softmax": lambda h: h.softmax(-1),
    "place of the highest": lambda h: h.argmax(-1) * h.sum(-1),
    "place of the highest, kept": lambda h: h.argmax(-1, keepdim=True) * h,
    "unit rows": lambda h: F.normalize(h, dim=-1),
}


class Reduced(nn.Module):
    def __init__(self, code: Reduction) -> None:
        super().__init__()
        self.up, self.code = nn.Linear(8, 12), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.up(x)).cos().mean()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_is_the_plain_models_and_gathers_nothing(name: str) -> None:
    torch.manual_seed(4)
    model, x = Reduced(REDUCTIONS[name]).double(), torch.randn(4, 8, dtype=torch.float64)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # capture says what ranks gather
        job = capture(model, x, loss, Parallel(tp=2), tp_plan={"up": "colwise"})
    assert_plain(job, model, loss, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["mean of large ones", "norm of large ones"])
def test_halves_are_added_up_as_by_kernels(name: str, dtype: torch.dtype) -> None:
    """In float32: a sum of halves would be more than they can be."""
    codes: dict[str, Reduction] = {
        "mean of large ones": lambda h: (h + 20000).mean(-1) / 20000,
        "norm of large ones": lambda h: (h + 500).norm(dim=-1) / 500,
    }
    torch.manual_seed(4)
    model, x = Reduced(codes[name]).to(dtype), torch.randn(4, 8, dtype=dtype)
    job = capture(model, x, lambda model, x: model(x).float(), Parallel(tp=2), tp_plan={"up": "colwise"})
    assert_plain(job, model, lambda model, x: model(x).float(), x, 0.05)


def test_the_first_of_equal_places_counts() -> None:
    torch.manual_seed(4)
    model = Reduced(lambda h: h.round().clamp(-1, 1).argmax(-1) * h.sum(-1)).double()
    x = torch.randn(16, 8, dtype=torch.float64) * 3

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    assert_plain(capture(model, x, loss, Parallel(tp=2), tp_plan={"up": "colwise"}), model, loss, x)
