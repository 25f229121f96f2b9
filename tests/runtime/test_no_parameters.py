"""Ranks whose stages have no parameters: what users write for every rank works there too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import stretto
from tests.capturing.zoo import mean_square, rows
from tests.clusters import cores


class HeavyEnd(nn.Module):
    """One small layer, and then much that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for _ in range(6):
            x = torch.softmax(x @ x.T, dim=-1) @ x
        return x


def trained(plan: stretto.Plan, model: nn.Module, batch: Tensor) -> list[dict[str, Tensor]]:
    def work(runner: stretto.Runner) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.1)
        for _ in range(2):
            runner.step(batch)
            torch.nn.utils.clip_grad_norm_(runner.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach().clone() for name, parameter in runner.named_parameters()}

    return stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_rank_without_parameters_trains(dp: int) -> None:
    torch.manual_seed(0)
    model, batch = HeavyEnd(), rows(8)[:, :8].contiguous()
    parallel = stretto.Parallel(pp=2, dp=dp, microbatches=2, split="auto")
    job = stretto.capture(model, batch, loss=mean_square, parallel=parallel)
    used = {stage for parameter in job.parameters for stage in parameter.stages}
    assert used == {0}, "the cut leaves the second stage without parameters"
    plan = stretto.plan(job, cores())
    results = trained(plan, model, batch)
    alone = stretto.Parallel(microbatches=2 * dp)
    plain = stretto.plan(stretto.capture(model, batch, loss=mean_square, parallel=alone), cores())
    [expected] = trained(plain, model, batch)
    for rank, result in enumerate(results):
        assert set(result) == (set(expected) if rank < dp else set())
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
