"""Losses that take a mean over a sharded tensor: their gradients are parts of the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.tensor.dtensor_adapter import local_of, new_spec, wrapped
from tests.tensor.lone import lone_rank

Loss = Callable[..., torch.Tensor]

X = torch.linspace(0.1, 0.8, 8 * 6, dtype=torch.float64).reshape(8, 6)
Y = torch.linspace(0.9, 0.2, 8 * 6, dtype=torch.float64).reshape(8, 6)

LOSSES: dict[str, Loss] = {
    "mse": F.mse_loss,
    "smooth l1": partial(F.smooth_l1_loss, beta=0.3),
    "huber": partial(F.huber_loss, delta=0.3),
    "soft margin": F.soft_margin_loss,
    "binary cross entropy": F.binary_cross_entropy,
    "l1": F.l1_loss,
    "with logits": F.binary_cross_entropy_with_logits,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_parts_gradient(loss: Loss, placement: Placement, reduction: str) -> None:
    plain = X.clone().requires_grad_()
    loss(plain, Y, reduction=reduction).backward()
    assert plain.grad is not None
    with lone_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        x = stretto.shard(X.clone().requires_grad_(), mesh, [placement])
        y = stretto.shard(Y, mesh, [placement])
        loss(x, y, reduction=reduction).backward()
        assert isinstance(x.grad, DTensor)
        assert x.grad.placements == (placement,)
        part = stretto.local(stretto.shard(plain.grad, mesh, [placement]))
        torch.testing.assert_close(stretto.local(x.grad), part, rtol=1e-12, atol=1e-12)


def test_pytorchs_own_is_too_large() -> None:
    """The day it is right, `stretto.tensor.losses` goes."""
    plain = X.clone().requires_grad_()
    F.mse_loss(plain, Y).backward()
    assert plain.grad is not None
    with lone_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        spec = new_spec(mesh, [Shard(0)], X.shape, X.stride(), X.dtype)
        x = wrapped(DTensor, X[:4].clone(), spec, requires_grad=True)
        F.mse_loss(x, wrapped(DTensor, Y[:4], spec)).backward()
        assert isinstance(x.grad, DTensor)
        torch.testing.assert_close(local_of(x.grad), 2 * plain.grad[:4])
