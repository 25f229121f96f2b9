"""A captured step by the public face, on ranks that are threads, against the plain model's microbatches."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.batch.loss import Loss
from tests.clusters import cores


def piece(batch: Any, count: int, at: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: piece(value, count, at) for key, value in batch.items()}
    return batch.chunk(count)[at] if isinstance(batch, Tensor) else batch


def plan_of(model: nn.Module, batch: Any, loss: Loss, parallel: stretto.Parallel) -> stretto.Plan:
    job = stretto.capture(model, batch, loss=loss, parallel=parallel)
    return stretto.plan(job, cluster=cores(), order="list")


def assert_plain(
    model: nn.Module, batch: Any, loss: Loss, parallel: stretto.Parallel, tolerance: float = 1e-10
) -> None:
    """Loss, gradients and buffers are those of the plain model, microbatch by microbatch (dp = 1, tp = 1)."""
    plan, count, own = plan_of(model, batch, loss, parallel), parallel.microbatches, copy.deepcopy(model)
    value = sum(loss(own, piece(batch, count, at)) for at in range(count)) / count
    value.backward()
    value = value.detach()

    def work(runner: stretto.Runner) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
        told = float(runner.step(batch))
        grads = {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}
        return told, grads, dict(runner.named_buffers())

    grads: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for told, found, kept in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert abs(told - float(value.detach())) <= tolerance * abs(float(value))
        grads |= found
        buffers |= kept
    expected = {n: p.grad for n, p in own.named_parameters(remove_duplicate=False) if p.grad is not None}
    assert grads.keys() <= expected.keys()
    assert {id(expected[name]) for name in grads} == {id(grad) for grad in expected.values()}
    largest = max(float(grad.norm()) for grad in expected.values())
    for name, grad in grads.items():
        wanted = expected[name]
        assert float((grad - wanted).norm()) <= tolerance * max(float(wanted.norm()), 1e-6 * largest), name
    named = dict(own.named_buffers())
    for name, kept in buffers.items():
        assert torch.allclose(kept, named[name], rtol=tolerance, atol=0), name
