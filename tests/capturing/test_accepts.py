"""Models, batches and losses of odd kinds: whatever they do, capture raises an error of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from tests.capturing.zoo import WIDTH, Chain, mean_square, rows

PARALLEL = stretto.Parallel(microbatches=2)


def with_parameter(value: Tensor) -> nn.Module:
    model = Chain()
    model.out.__dict__["_parameters"]["weight"] = value
    return model


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("cannot tell")


def raising(error: BaseException) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        raise error

    return loss


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: nn.Sequential(nn.LazyLinear(4)),
            "parameter '0.weight' has no shape before the module's first call",
        ),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d()), "'1.weight' has no shape"),
        (
            lambda: with_parameter(nn.Parameter(torch.eye(2, WIDTH).double().to_sparse())),
            "parameter 'out.weight' is a sparse or nested tensor",
        ),
        (
            lambda: with_parameter(Chain().out.weight * 1),
            "parameter 'out.weight' is the result of a computation",
        ),
    ],
)
def test_models(model: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(model(), rows(), mean_square, PARALLEL)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (rows().to_sparse(), "batch leaf 'batch' is a sparse_coo tensor"),
        ({"x": torch.nested.nested_tensor([rows(2), rows(1)])}, "batch leaf 'x' is a nested tensor"),
    ],
)
def test_batches(batch: Any, message: str) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        stretto.capture(Chain(), batch, mean_square, PARALLEL)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (raising(SilentError()), "SilentError"),
        (raising(RecursionError("deep")), "RecursionError: deep"),
        (raising(StopIteration()), "StopIteration"),
        (raising(AssertionError()), "AssertionError"),
        (lambda model, batch: torch.complex(*[mean_square(model, batch)] * 2), "is a complex number"),
        (torch.no_grad()(mean_square), "computed under torch.no_grad"),
        (lambda model, batch: None, "returned None: it lacks a return; return its mean loss"),
        (lambda model: 1, "takes 1 positional argument but 2 were given"),
    ],
)
def test_losses(loss: Any, message: str) -> None:
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(Chain(), rows(), loss, PARALLEL)
    assert message in str(caught.value)
    assert "ValueError: " not in str(caught.value)


def test_the_user_may_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        stretto.capture(Chain(), rows(), raising(KeyboardInterrupt()), PARALLEL)
