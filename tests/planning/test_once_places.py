"""Where reductions, gathers and updates stand: plans that were refused, or had a bound above their step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import stretto
from tests.planning.test_reductions import accelerators


class Tied(nn.Module):
    """Layers on the second of two ranks that are tied to those of the first, in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))
        self.layers[4].weight = self.layers[1].weight
        self.layers[5].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Block(nn.Module):
    """Small layers beside large ones, so that gradients are in buckets of several stages."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(1024, 128), (128, 1024), (1024, 1024)] * 2
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x)).square().mean()


@pytest.mark.parametrize("updates", [False, True])
def test_ranks_sum_ties_in_one_order(updates: bool) -> None:
    parallel = stretto.Parallel(pp=2, dp=2, zero=1, microbatches=2, updates=updates)
    job = stretto.capture(Tied(), torch.zeros(8, 8), loss=loss, parallel=parallel)
    assert stretto.plan(job, accelerators(), order="list").overlap == "local"


def test_a_wait_stands_before_all_that_need_it() -> None:
    """Of a bucket whose sum several later ones need, which start in different runs."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(6)))
    model[4].layers[5].weight = model[0].layers[5].weight
    parallel = stretto.Parallel(
        pp=2,
        dp=4,
        dp_shard=2,
        zero=1,
        microbatches=2,
        schedule="interleaved-1f1b",
        split=["1", "2", "3", "4", "5"],
    )
    job = stretto.capture(model, torch.empty(16, 1024, device="meta"), loss=loss, parallel=parallel)
    assert stretto.plan(job, accelerators(), order="captured").overlap == "local"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_bound_is_no_longer_than_a_step_with_updates(zero: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    parallel = stretto.Parallel(dp=2, microbatches=2, zero=zero, updates=True)  # type: ignore[arg-type]
    job = stretto.capture(model, torch.empty(512, 1024, device="meta"), loss=loss, parallel=parallel)
    plan = stretto.plan(job, "a100-80gbx8", order="list")
    assert plan.prediction is not None
    assert plan.prediction.bound_us <= plan.prediction.step_us
