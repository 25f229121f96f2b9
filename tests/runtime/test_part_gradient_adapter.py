"""Gradients of parts: one number of all their elements is refused, all else is as of any tensor."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stretto
from stretto.models.gpt import next_token_loss
from stretto.runtime.part_gradient_adapter import PartGradient
from stretto.train.clip import GradientClip
from tests.runtime.test_optimizer_trial import BATCH, planned


def part() -> torch.Tensor:
    return (torch.arange(6.0).reshape(2, 3) + 1).as_subclass(PartGradient)


@pytest.mark.parametrize(
    "one",
    [
        torch.norm,
        torch.linalg.vector_norm,
        lambda g: g.data.float().square().sum(),
        lambda g: g.pow(2).mean(),
        lambda g: torch._foreach_norm([g, g])[0],
        lambda g: torch.vdot(g.view(-1), torch.ones(6)),
        lambda g: torch.nn.utils.get_total_norm([g]),
    ],
)
def test_one_number_of_a_part_is_refused(one: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(stretto.UsageError, match=r"this rank's part.*GradientClip.*as_subclass"):
        one(part())


@pytest.mark.parametrize(
    "one",
    [
        lambda g: g.as_subclass(torch.Tensor).norm(),
        lambda g: g.isfinite().all(),
        lambda g: g[0].sum(),
        lambda g: (g - 1).clone().norm(),
        lambda g: torch.zeros_like(g),
        lambda g: copy.deepcopy(g),
        lambda g: torch.zeros(2, 3).lerp_(g, 0.1),
        lambda g: g * torch.ones(2, 3),
        lambda g: torch.cat([g, g]),
    ],
)
def test_all_else_is_what_it_is_of_a_tensor(one: Callable[[torch.Tensor], torch.Tensor]) -> None:
    got, want = one(part()), one(part().as_subclass(torch.Tensor))
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)


def test_a_file_has_a_plain_tensor() -> None:
    file = io.BytesIO()
    torch.save({"grad": part()}, file)
    read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["grad"]
    assert type(read) is torch.Tensor
    assert torch.equal(read, part())


def test_clipping_each_tensor_is_refused_and_clipping_by_the_whole_norm_is_not() -> None:
    model, plan = planned(tp=2)

    def by_tensor(runner: stretto.Runner) -> None:
        for _ in range(2):  # gradients that are added know it too
            runner.step(BATCH)
        for p in runner.parameters():
            assert p.grad is not None
            p.grad.mul_((0.01 * p.detach().norm() / p.grad.norm()).clamp(max=1))

    with pytest.raises(stretto.UsageError, match="this rank's part"):
        stretto.run_threads(plan, lambda _: copy.deepcopy(model), by_tensor)

    def by_all(runner: stretto.Runner) -> float:
        runner.step(BATCH)
        return float(GradientClip(runner, 1.0)())

    plain = copy.deepcopy(model)
    next_token_loss(plain, BATCH).backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    for found in stretto.run_threads(plan, lambda _: copy.deepcopy(model), by_all):
        assert abs(found - norm) <= 1e-10 * norm


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("bound", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_])
def test_pytorchs_clip_by_norm_is_refused_where_a_rank_has_a_part(
    layout: dict[str, Any], bound: Callable[..., torch.Tensor]
) -> None:
    model, plan = planned(**layout)

    def work(runner: stretto.Runner) -> None:
        runner.step(BATCH)
        bound(list(runner.parameters()), 1.0)

    with pytest.raises(stretto.UsageError, match="GradientClip"):
        stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
