"""Evaluation walks a plan of forwards alone: the loss is that of the plain model in eval() mode."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.errors import CaptureError, PlanError
from stretto.ir.action import Phase
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.schedule.forward import forward_schedule
from stretto.verifying.plan import plan_faults

CLUSTER = stretto.Cluster()


def small(tie: bool = False) -> GPT:
    config = GPTConfig(
        vocab_size=50, layers=2, hidden=16, heads=2, context=8, dropout=0.3, tie_embeddings=tie
    )
    return GPT(config, seed=1).double()


def batch() -> torch.Tensor:
    return torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_forward_plan_gives_the_loss_without_dropout(pp: int, tie: bool) -> None:
    model = small(tie)
    job = stretto.capture(model, batch(), next_token_loss, stretto.Parallel(pp=pp, microbatches=4))
    forward = capture_evaluation(model, batch(), next_token_loss, job)
    assert not forward.trains
    assert job.trains
    assert model.training
    assert not any(op.random for stage in forward.stages for op in stage.ops[Phase.F])
    for trained, evaluated in zip(job.parameters, forward.parameters, strict=True):
        assert evaluated.stages == trained.stages

    plan, walk = stretto.plan(job, CLUSTER), stretto.plan(forward, CLUSTER)
    copies = [copy.deepcopy(model) for _ in range(pp)]

    def work(runner: stretto.Runner) -> tuple[torch.Tensor, torch.Tensor]:
        evaluation = stretto.Runner(walk, copies[runner.rank], transport=runner.transport)
        before = evaluation.step(batch())
        assert all(p.grad is None for p in runner.parameters())
        return before, runner.step(batch())

    for before, trained in stretto.run_threads(plan, lambda rank: copies[rank], work):
        expected = next_token_loss(copy.deepcopy(model).eval(), batch())
        torch.testing.assert_close(before, expected.detach(), rtol=1e-12, atol=0)
        assert trained != before  # training still drops out


def test_a_job_that_trains_is_refused_without_its_backward() -> None:
    job = stretto.capture(small(), batch(), next_token_loss, stretto.Parallel(pp=2, microbatches=2))
    with pytest.raises(PlanError, match="no backward of microbatches 0, 1"):
        make_plan(job, stretto.plan(job, CLUSTER).costs, schedule=forward_schedule(2, 2))


def test_a_forward_plan_needs_every_forward() -> None:
    job = stretto.capture(small(), batch(), next_token_loss, stretto.Parallel(pp=2, microbatches=2))
    walk = stretto.plan(capture_evaluation(small(), batch(), next_token_loss, job), CLUSTER)
    assert plan_faults(walk) == []
    without = tuple(i for i in walk.orders[0] if str(i) != "run 0F:1")
    cut = replace(walk, orders=(without, walk.orders[1]))
    assert any("no forward of microbatch" in str(fault) for fault in plan_faults(cut))


class TwoOrders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = None
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.first, self.second) if self.training else (self.second, self.first)
        return layers[1](layers[0](x))


def test_a_model_that_evaluates_with_other_modules_is_refused() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    job = stretto.capture(TwoOrders(), torch.zeros(4, 4), loss, stretto.Parallel(pp=2, microbatches=2))
    with pytest.raises(CaptureError, match="another order"):
        capture_evaluation(TwoOrders(), torch.zeros(4, 4), loss, job)
