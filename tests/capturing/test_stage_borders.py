"""What happens at the borders of stages: views, terms, ties and batches that plain models bring along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.capturing.evaluation import capture_evaluation
from stretto.ir.action import Schedule, parse_slot
from tests.capturing.steps import assert_plain
from tests.capturing.zoo import mean_square
from tests.clusters import cores

FOUR = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
NAMES = ["1", "2", "3"]


def job_of_four(model: nn.Module = FOUR, columns: int = 4, **given: Any) -> stretto.Job:
    parallel = stretto.Parallel(microbatches=2, **given)
    return stretto.capture(model, torch.randn(2, columns), loss=mean_square, parallel=parallel)


def linears(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


class Positions(nn.Module):
    """Adds a parameter at the end of a stage: its gradient is the message that comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + self.positions)


class Tied(nn.Module):
    def __init__(self, detached: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.detached = detached
        self.embedding = nn.Embedding(16, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.hidden(self.embedding(tokens))
        return nn.functional.linear(x, self.head.weight.detach()) if self.detached else self.head(x)


def next_tokens(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["x"])
    return nn.functional.cross_entropy(logits.reshape(-1, 16), batch["y"].reshape(-1))


TOKENS = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, dict[str, Any]]] = {
    **{
        f"views cut at {cut}": (lambda: linears(4), X, mean_square, {"split": [cut], "schedule": "zb-h1"})
        for cut in NAMES
    },
    "four automatic stages": (lambda: linears(8), X, mean_square, {"pp": 4}),
    "a term at the end of a stage": (Positions, X, mean_square, {"split": ["last"]}),
    "a tie": (Tied, TOKENS, mean_square, {"split": ["hidden"]}),
    "a tie that one stage trains": (lambda: Tied(True), TOKENS, mean_square, {"split": ["hidden"]}),
    "a tie that none trains": (lambda: Tied(frozen=True), TOKENS, mean_square, {"split": ["hidden"]}),
    "slices of one tensor": (
        lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)),
        {"x": TOKENS[:, :-1], "y": TOKENS[:, 1:]},
        next_tokens,
        {"microbatches": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_plain_models(name: str) -> None:
    make, batch, loss, layout = CASES[name]
    torch.manual_seed(0)
    assert_plain(make().double(), batch, loss, stretto.Parallel(**{"pp": 2, "microbatches": 4, **layout}))


def test_replaced_and_frozen_parameters() -> None:
    model = nn.Linear(4, 4)
    runner = stretto.Runner(stretto.plan(job_of_four(model), cores()), model)
    model.bias.requires_grad_(False)
    runner.step(torch.randn(2, 4))
    assert model.bias.grad is None
    assert model.weight.grad is not None
    model.weight.data = torch.randn(4, 4)
    with pytest.raises(stretto.UsageError, match="parameter 'weight' has got another tensor"):
        runner.step(torch.randn(2, 4))


def test_capture_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        job = job_of_four()
    assert all(parameter.grads for parameter in job.parameters)


def own_order(*ranks: str) -> Schedule:
    orders = tuple(tuple(parse_slot(token) for token in order.split()) for order in ranks)
    return Schedule("by hand", 4, 2, (0, 1, 0, 1), orders)


LOOPED = own_order("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1")


def test_stages_that_are_not_one_a_rank_need_a_schedule_of_ones_own() -> None:
    job = job_of_four(pp=2, split=NAMES, schedule="1f1b")
    with pytest.raises(stretto.UsageError, match="capture with 2 stages"):
        stretto.plan(job, cores())
    assert stretto.plan(job, cores(), schedule=LOOPED).ranks == 2
    with pytest.raises(stretto.UsageError, match="is for 2 ranks, but pp = 4"):
        stretto.plan(replace(job, pp=4), cores(), schedule=LOOPED)
    with pytest.raises(stretto.UsageError, match="max_live = 1"):
        stretto.plan(replace(job, max_live=1), cores(), schedule=LOOPED)


def test_evaluation_stays_on_the_ranks_of_the_training() -> None:
    x, job = torch.randn(2, 4), job_of_four(pp=2, split=NAMES)
    training = stretto.plan(job, cores(), schedule=LOOPED)
    evaluation = capture_evaluation(FOUR, x, mean_square, job)
    plan = stretto.plan(evaluation, cores(), schedule=training.schedule)
    assert plan.schedule.stage_ranks == (0, 1, 0, 1)
    results = stretto.run_threads(plan, lambda _: FOUR, lambda runner: float(runner.step(x)))
    assert results == pytest.approx([mean_square(FOUR, x).item()] * 2, rel=1e-5)
