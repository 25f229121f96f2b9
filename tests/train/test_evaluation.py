"""`stretto.Evaluation`: the loss of batches that are not trained on, with the parameters that are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.clusters import cores
from torch import nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.errors import CaptureError, PlanError
from stretto.ir.action import Phase
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import forward_schedule
from stretto.verifying.plan import plan_faults

CLUSTER = cores()
CONFIG = GPTConfig(vocab_size=48, layers=2, hidden=16, heads=2, context=8, dropout=0.3, tie_embeddings=True)


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 48, (8, 9), generator=torch.Generator().manual_seed(seed))


def batches() -> Iterator[torch.Tensor]:
    yield from (batch(seed) for seed in (7, 8, 9))


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(stretto.Parallel(), marks=pytest.mark.slow),
        pytest.param(stretto.Parallel(pp=2, microbatches=4), marks=pytest.mark.slow),
        stretto.Parallel(tp=2, sequence_parallel=True, microbatches=2),
        pytest.param(stretto.Parallel(dp=2), marks=pytest.mark.slow),
    ],
    ids=["alone", "pp", "tp", "dp"],
)
def test_it_is_the_plain_models_while_it_trains(parallel: stretto.Parallel) -> None:
    model = GPT(CONFIG, seed=1).double()
    copies = [copy.deepcopy(model) for _ in range(parallel.world)]
    plan = stretto.plan(stretto.capture(model, batch(0), next_token_loss, parallel), CLUSTER)

    def work(runner: stretto.Runner) -> tuple[list[float], dict[str, torch.Tensor]]:
        evaluation = stretto.Evaluation(
            runner, copies[runner.rank], batch(0), next_token_loss, parallel=parallel
        )
        optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
        found = [evaluation.loss(batches())]
        assert all(parameter.grad is None for parameter in runner.parameters())
        runner.step(batch(0))
        optimizer.step()
        found.append(evaluation.loss(list(batches())))
        return found, runner.state_dict()

    def plain(trained: GPT) -> float:
        return sum(float(next_token_loss(trained.eval(), one)) for one in batches()) / 3

    for (before, after), values in stretto.run_threads(plan, lambda rank: copies[rank], work):
        fresh = GPT(CONFIG, seed=1).double()
        assert before == pytest.approx(plain(fresh), rel=1e-12)
        fresh.load_state_dict(values)
        assert after == pytest.approx(plain(fresh), rel=1e-12)
        assert after != before


class Normed(nn.Module):
    """With a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(48, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2))
        return out


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2, "split": ["head"]}], ids=["dp", "pp dp"])
def test_copies_evaluate_one_model(layout: dict[str, Any]) -> None:
    """Each copy has a batch norm of its own; the first one's is evaluated, and none changes."""
    parallel = stretto.Parallel(**layout)
    torch.manual_seed(0)
    model = Normed().double()
    copies = [copy.deepcopy(model) for _ in range(parallel.world)]
    plan = stretto.plan(stretto.capture(model, batch(0), next_token_loss, parallel), CLUSTER, order="list")

    def work(runner: stretto.Runner) -> tuple[float, dict[str, torch.Tensor]]:
        mine = copies[runner.rank]
        evaluation = stretto.Evaluation(
            runner, mine, batch(0), next_token_loss, parallel=parallel, order="list"
        )
        for _ in range(2):
            runner.step(batch(0))
            torch.optim.SGD(runner.parameters(), lr=0.1).step()
            before = {name: buffer.clone() for name, buffer in runner.named_buffers()}
            found = evaluation.loss(batches())
            assert all(torch.equal(before[name], buffer) for name, buffer in runner.named_buffers())
        return found, runner.state_dict()

    for found, values in stretto.run_threads(plan, lambda rank: copies[rank], work):
        own = Normed().double()
        own.load_state_dict(values)
        losses = [next_token_loss(own.eval(), part) for one in batches() for part in one.chunk(2)]
        assert found == pytest.approx(float(torch.stack(losses).mean().detach()), rel=1e-12)


def test_what_it_refuses() -> None:
    model = GPT(CONFIG, seed=1)

    parallel = stretto.Parallel()
    plan = stretto.plan(stretto.capture(model, batch(0), next_token_loss, parallel), CLUSTER)

    def of_nothing(runner: stretto.Runner) -> None:
        stretto.Evaluation(runner, model, batch(0), next_token_loss, parallel=parallel).loss([])

    with pytest.raises(stretto.UsageError, match="none was given"):
        stretto.run_threads(plan, lambda _: copy.deepcopy(model), of_nothing)


def test_a_forward_plan_needs_every_forward_and_a_training_plan_its_backward() -> None:
    parallel = stretto.Parallel(pp=2, microbatches=2)
    job = stretto.capture(GPT(CONFIG, seed=1), batch(0), next_token_loss, parallel)
    with pytest.raises(PlanError, match="no backward"):
        make_plan(job, stretto.plan(job, CLUSTER).costs, schedule=forward_schedule(2, 2))
    forward = capture_evaluation(GPT(CONFIG, seed=1), batch(0), next_token_loss, job)
    assert (forward.trains, job.trains) == (False, True)
    assert not any(op.random for stage in forward.stages for op in stage.ops[Phase.F])
    assert [p.stages for p in forward.parameters] == [p.stages for p in job.parameters]
    walk = stretto.plan(forward, CLUSTER)
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
