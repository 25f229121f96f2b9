"""A rank is rehearsed on an accelerator: transfers last as long as predicted, and run under compute."""

from __future__ import annotations

import pytest
import torch

import stretto
from stretto.config import Parallel
from stretto.models.gpt import GPT, GPTConfig, next_token_sum

pytestmark = pytest.mark.gpu


def plan_of(overlap: str, **axes: int) -> stretto.Plan:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32000, layers=2, hidden=4096, heads=32, context=4096), seed=3)
    batch = torch.zeros(4 * axes.get("dp", 1), 4097, dtype=torch.int64, device="meta")
    parallel = Parallel(microbatches=4, overlap=overlap, **axes)  # type: ignore[arg-type]
    job = stretto.capture(
        model, batch, loss=next_token_sum, parallel=parallel, precision="bf16", device="cuda"
    )
    return stretto.plan(job, "h200x16")


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_a_rank_hides_what_its_plan_hides(axes: dict[str, int]) -> None:
    """Other layouts of ops of one size: the host must be ahead, or nothing is exposed that could be."""
    told: dict[str, stretto.Rehearsal] = {}
    for overlap in ("off", "window"):
        plan = plan_of(overlap, **axes)
        told[overlap] = stretto.rehearse(plan, 0)
        print(overlap, axes, told[overlap], sep="\n")
    # Of the walk's own time nothing is a wait for communication.
    for found in told.values():
        assert found.compute_us + sum(found.exposed_us.values()) + found.bubble_us == pytest.approx(
            found.step_us, rel=0.02
        )
    hidden = told["window"]
    assert sum(hidden.exposed_us.values()) <= 0.05 * hidden.step_us
