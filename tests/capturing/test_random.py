"""Draws depend on seed, step, microbatch and op, not on schedule or cut; the user's generator is left."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.capturing.trace import trace
from stretto.ir.program import Job
from stretto.models.gpt import next_token_loss
from tests.capturing.zoo import Dropout, Noise, mean_square, rows
from tests.cells import but
from tests.families import ONE_STAGE
from tests.runtime.equality import (
    Result,
    assert_same_bits,
    evenly,
    gpt,
    lowered,
    plan_of,
    run,
    tokens,
)

KINDS = {"dropout": Dropout, "noise": Noise, "attention": lambda: gpt(False, dropout=0.2, layers=1)}


def job_for(
    model: nn.Module,
    stages: int = 2,
    microbatches: int = 4,
) -> Job:
    return evenly(trace(model, rows(), mean_square, microbatches=microbatches), stages, microbatches)


@pytest.mark.parametrize("kind", but(KINDS, ["noise"]))
def test_draws_depend_on_neither_schedule_nor_cut(kind: str) -> None:
    shows = kind == "attention"  # the dropout of embeddings and blocks, too
    batch, loss = (tokens(4, columns=8), next_token_loss) if shows else (rows(), mean_square)
    model = KINDS[kind]()
    found = trace(model, batch, loss, microbatches=4)
    first = run(lowered(evenly(found, 1, 4), "gpipe"), model, batch)
    for stages in (1, 2, 4):
        job = evenly(found, stages, 4)
        for family in ONE_STAGE if stages == 4 and not shows else ("1f1b", "zb-h2"):
            assert_same_bits(run(lowered(job, family), model, batch), first)


def test_seeds_steps_and_microbatches_draw_differently() -> None:
    model = Dropout()
    batch = rows(1).expand(8, -1).contiguous()
    job = job_for(model)
    plan = plan_of(job)

    def losses(runner: stretto.Runner) -> list[float]:
        return [float(runner.step(batch)) for _ in range(3)]

    one, _ = stretto.run_threads(plan, lambda _: copy.deepcopy(model), losses, seed=1)
    again, _ = stretto.run_threads(plan, lambda _: copy.deepcopy(model), losses, seed=1)
    other, _ = stretto.run_threads(plan, lambda _: copy.deepcopy(model), losses, seed=2)
    assert one == again
    assert len({*one, *other}) == 6
    # Equal rows: if the microbatches drew alike, one microbatch's loss would be the loss of all four.
    single = plan_of(job_for(model, 2, 1))
    alike, _ = stretto.run_threads(
        single, lambda _: copy.deepcopy(model), lambda r: float(r.step(batch)), seed=1
    )
    assert alike != one[0]


def test_the_forward_and_the_backward_see_one_draw() -> None:
    """The loss moves along its gradient as it should: the derivative, by differences, in float64."""
    model, batch = Dropout(), rows()
    plan = plan_of(job_for(model, 4), "zb-h1")
    at = run(plan, model, batch)
    size = 1e-6

    def moved(sign: float) -> Result:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                grad = at.grads[name]
                assert grad is not None
                parameter.add_(grad, alpha=sign * size)
        return run(plan, other, batch)

    slope = float(moved(1).loss - moved(-1).loss) / (2 * size)
    expected = sum(float(grad.square().sum()) for grad in at.grads.values() if grad is not None)
    assert slope == pytest.approx(expected, rel=1e-6)


def test_the_rate_of_dropout_is_kept() -> None:
    """Of many draws by many microbatches, as many are zero as were asked for."""

    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            return (nn.functional.dropout(self.weight.expand(len(x), -1), 0.25) * x).mean()

    model, batch = Only(), torch.ones(64, 1000)
    found = trace(model, batch, lambda m, b: m(b), microbatches=32)
    result = run(lowered(evenly(found, 1, 32), "1f1b"), model, batch)
    grad = result.grads["weight"]
    assert grad is not None
    kept = grad * 64 * 1000 * 0.75
    assert float(kept.mean() / 64) == pytest.approx(0.75, abs=0.01)
    assert float(kept.std()) == pytest.approx((64 * 0.75 * 0.25) ** 0.5, rel=0.1)


def test_the_users_generator_is_left_as_it_was() -> None:
    model, batch = Dropout(), rows()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    plan = plan_of(job_for(model), "zb-h2")
    assert torch.equal(torch.get_rng_state(), before), "capture draws nothing"
    run(plan, model, batch, steps=3)
    assert torch.equal(torch.get_rng_state(), before)
