"""The update: gradients clipped by the global norm of the full model, and the learning rate by step."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from tests.clusters import cores
from torch import nn

import stretto
from stretto.config import LRScheduleSettings
from stretto.ir.plan import Plan
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.runtime.rank_tensors import part_of
from stretto.train.clip import GradientClip
from stretto.train.optimizer import learning_rate


@functools.cache
def planned(tie: bool, dtype: torch.dtype, **layout: Any) -> tuple[nn.Module, Plan]:
    """The model, which no one may change, and its plan."""
    config = GPTConfig(vocab_size=40, layers=3, hidden=16, heads=2, context=8, tie_embeddings=tie)
    model = GPT(config).to(dtype)
    parallel = stretto.Parallel(microbatches=2, **layout)
    job = stretto.capture(model, torch.zeros(4, 9, dtype=torch.int64), next_token_loss, parallel)
    return model, stretto.plan(job, cores())


def check(model: nn.Module, plan: Plan, scale: float, max_norm: float, rtol: float) -> None:
    """Norm and gradients are those of `torch.nn.utils.clip_grad_norm_` in one process. rtol 0: to the bit."""
    draw = torch.Generator().manual_seed(3)
    given = {
        n: scale * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in model.named_parameters()
    }
    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        parameter.grad = given[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm or math.inf)
    expected = {n: p.grad for n, p in plain.named_parameters()}
    copies = [copy.deepcopy(model) for _ in range(plan.world)]
    known = {p.name: p for p in plan.job.parameters}

    def work(runner: stretto.Runner) -> torch.Tensor:
        def mine(values: dict[str, Any], name: str) -> torch.Tensor:
            return part_of(values[known[name].tied_to], known[name], plan.job, runner.coordinates)

        clip = GradientClip(runner, max_norm)
        for name, parameter in runner.named_parameters():
            parameter.grad = mine(given, name).clone()
        norm = clip()
        for name, parameter in runner.named_parameters():
            torch.testing.assert_close(parameter.grad, mine(expected, name), rtol=rtol, atol=0)
        return norm

    norms = stretto.run_threads(plan, lambda rank: copies[rank], work)
    assert all(torch.equal(one, norms[0]) for one in norms)
    torch.testing.assert_close(norms[0], norm, rtol=rtol / 10, atol=0)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize(("scale", "max_norm"), [(1.0, 0.5), (1e-4, 1.0), (1.0, 0.0)])
def test_over_stages_they_are_the_bits_of_one_process(
    pp: int, tie: bool, dtype: torch.dtype, scale: float, max_norm: float
) -> None:
    check(*planned(tie, dtype, pp=pp), scale, max_norm, rtol=0)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        {"dp": 2},
        {"pp": 2, "dp": 2, "tp": 2, "sequence_parallel": True},
        {"pp": 2, "split": "embedding,layer*3,loss|"},
    ],
    ids=lambda layout: " ".join(layout),
)
def test_parts_and_copies_are_clipped_by_the_norm_of_the_full_model(layout: dict[str, Any]) -> None:
    check(*planned(True, torch.float64, **layout), 1.0, 0.5, rtol=1e-13)


def rates(steps: int, **settings: object) -> list[float]:
    schedule = LRScheduleSettings(**settings)  # type: ignore[arg-type]
    return [learning_rate(schedule, 2.0, steps, step) for step in range(steps)]


def test_the_rate_follows_its_schedule() -> None:
    assert rates(10, warmup_steps=4, kind="constant") == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6
    assert rates(5, kind="linear", min_lr_ratio=0.0) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])
    cosine = rates(11, kind="cosine", min_lr_ratio=0.1)
    assert cosine == pytest.approx([0.2 + 1.8 * (1 + math.cos(math.pi * n / 10)) / 2 for n in range(11)])
    assert rates(3, warmup_steps=3, kind="cosine")[-1] == 2.0
    assert rates(2, warmup_steps=8, kind="cosine") == [0.25, 0.5], "a run that ends on the way"
    schedule = LRScheduleSettings(kind="linear", min_lr_ratio=0.25)
    assert learning_rate(schedule, 1.0, 5, 9) == 0.25, "beyond its steps"
