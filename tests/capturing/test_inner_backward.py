"""Code that runs a backward of its own, past the graph, is refused wherever it stands."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward as torch_backward
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import stretto
from tests.capturing.zoo import Chain, mean_square, rows

PARALLEL = stretto.Parallel(pp=2, microbatches=2)


class Own(torch.autograd.Function):
    """Checkpointing as other libraries have it."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(grad)
        return None, x.grad


class Imported(Own):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        torch_backward(ctx.function(ctx.saved_tensors[0]), grad)


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def in_parts(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential([layer, nn.Tanh()], 2, x, use_reentrant=True)


def own(layer: nn.Module, x: Tensor) -> Tensor:
    return Own.apply(layer, x)


def imported(layer: nn.Module, x: Tensor) -> Tensor:
    return Imported.apply(layer, x)


class Checkpointed(Chain):
    def __init__(self, how: Any, where: int | None, frozen: bool) -> None:
        super().__init__()
        self.how, self.where = how, where
        self.layers[0].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if not x.requires_grad:
            x.requires_grad_(True)  # as peft does for frozen embeddings
        for at, layer in enumerate(self.layers[1:], 1):
            x = torch.tanh(self.how(layer, x) if self.where in (None, at) else layer(x))
        return self.out(x)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("where", [None, 3])
@pytest.mark.parametrize("how", [reentrant, in_parts, own, imported])
def test_checkpoints_that_run_a_backward(how: Any, where: int | None, frozen: bool) -> None:
    with pytest.raises(stretto.CaptureError) as caught:
        stretto.capture(Checkpointed(how, where, frozen), rows(), mean_square, PARALLEL)
    message = str(caught.value)
    assert "runs a backward of its own within the backward, whose gradients no plan has" in message
    assert "recompute='full'" in message
    assert f"{__file__}:" in message or how is in_parts
    if how in (reentrant, in_parts):
        assert "torch.utils.checkpoint with use_reentrant=True" in message
        assert "give use_reentrant=False" in message


def backward_in_loss(model: nn.Module, batch: Tensor) -> Tensor:
    value = mean_square(model, batch)
    value.backward()
    return value


def test_a_loss_that_runs_a_backward() -> None:
    with pytest.raises(
        stretto.CaptureError, match=r"let loss.* return the loss, of which capture makes the backward"
    ):
        stretto.capture(Chain(), rows(), backward_in_loss, PARALLEL)


def test_the_process_is_left_as_it_was() -> None:
    model = Checkpointed(reentrant, None, False)
    with pytest.raises(stretto.CaptureError):
        stretto.capture(model, rows(), mean_square, PARALLEL)
    backward_in_loss(model, rows())
    assert all(p.grad is not None for p in model.parameters())
    Own.apply(model.out, rows().requires_grad_()).sum().backward()


class Stopped(torch.autograd.Function):
    """Ctrl-C comes while PyTorch traces the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_in_the_backward_is_not_told_as_an_ops_error() -> None:
    class Model(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return Stopped.apply(super().forward(x))

    with warnings.catch_warnings(record=True, action="always") as seen, pytest.raises(KeyboardInterrupt):
        stretto.capture(Model(), rows(), mean_square, PARALLEL)
    assert not [one for one in seen if "Error detected" in str(one.message)]
