"""Clipping by the global norm: the bits that PyTorch gives in a single process; of parts, the same sum."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tests.clusters import cores
from torch import nn

import stretto
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.runtime.rank_tensors import part_of
from stretto.train.clip import GradientClip


def gradients(model: nn.Module, scale: float) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        n: scale * torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in model.named_parameters()
    }


@functools.cache
def planned(pp: int, tie: bool, dtype: torch.dtype) -> tuple[nn.Module, Job, Plan]:
    """The model, which nobody may change, and its plan."""
    config = GPTConfig(vocab_size=40, layers=3, hidden=16, heads=2, context=8, tie_embeddings=tie)
    model = GPT(config).to(dtype)
    batch = torch.zeros(4, 9, dtype=torch.int64)
    job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(pp=pp, microbatches=2))
    return model, job, stretto.plan(job, cores())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize(("scale", "max_norm"), [(1.0, 0.5), (1e-4, 1.0), (1.0, 0.0)])
def test_norm_and_gradients_are_those_of_one_process(
    pp: int, tie: bool, dtype: torch.dtype, scale: float, max_norm: float
) -> None:
    model, job, plan = planned(pp, tie, dtype)
    given = gradients(model, scale)

    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        parameter.grad = given[name].clone()
    limit = max_norm or float("inf")
    expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
    expected = {n: p.grad for n, p in plain.named_parameters()}

    copies = [copy.deepcopy(model) for _ in range(pp)]
    first = {p.name: p.tied_to for p in job.parameters}

    def work(runner: stretto.Runner) -> torch.Tensor:
        clip = GradientClip(runner, max_norm)
        for name, parameter in runner.named_parameters():
            parameter.grad = given[first[name]].clone()
        norm = clip()
        for name, parameter in runner.named_parameters():
            assert torch.equal(parameter.grad, expected[first[name]])  # type: ignore[arg-type]
        return norm

    norms = stretto.run_threads(plan, lambda rank: copies[rank], work)
    assert all(torch.equal(norm, expected_norm) for norm in norms)


LAYOUTS = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2},
    {"pp": 2, "dp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 2, "split": "embedding,layer*2,loss|"},
]


@pytest.mark.parametrize(
    "layout",
    # With the sequence spread, there are parts and copies of all kinds, and with all axes all of them.
    [pytest.param(one, marks=pytest.mark.slow if one in LAYOUTS[:2] else ()) for one in LAYOUTS],
    ids=lambda layout: " ".join(layout),
)
def test_parts_and_copies_are_clipped_by_the_norm_of_the_whole(layout: dict[str, Any]) -> None:
    config = GPTConfig(vocab_size=40, layers=2, hidden=16, heads=2, context=8, tie_embeddings=True)
    model = GPT(config).double()
    batch = torch.zeros(4, 9, dtype=torch.int64)
    job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(microbatches=2, **layout))
    plan = stretto.plan(job, cores())
    given = gradients(model, 1.0)
    plain = copy.deepcopy(model)
    for name, parameter in plain.named_parameters():
        parameter.grad = given[name].clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    expected = {n: p.grad for n, p in plain.named_parameters()}
    copies = [copy.deepcopy(model) for _ in range(plan.world)]
    known = {p.name: p for p in job.parameters}

    def mine(runner: stretto.Runner, whole: torch.Tensor, name: str) -> torch.Tensor:
        return part_of(whole, known[name], job, runner.coordinates)

    def work(runner: stretto.Runner) -> torch.Tensor:
        clip = GradientClip(runner, 0.5)
        for name, parameter in runner.named_parameters():
            parameter.grad = mine(runner, given[known[name].tied_to], name).clone()
        norm = clip()
        for name, parameter in runner.named_parameters():
            whole = expected[known[name].tied_to]
            assert whole is not None
            torch.testing.assert_close(parameter.grad, mine(runner, whole, name), rtol=1e-13, atol=0)
        return norm

    norms = stretto.run_threads(plan, lambda rank: copies[rank], work)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    torch.testing.assert_close(norms[0], expected_norm, rtol=1e-14, atol=0)
