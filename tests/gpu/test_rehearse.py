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
        model = GPT(GPTConfig(vocab_size=32000, layers=4, hidden=2048, heads=16, context=2048), seed=3)
    batch = torch.zeros(8 * axes.get("dp", 1), 2049, dtype=torch.int64, device="meta")
    parallel = Parallel(microbatches=8, overlap=overlap, **axes)  # type: ignore[arg-type]
    job = stretto.capture(
        model, batch, loss=next_token_sum, parallel=parallel, precision="bf16", device="cuda"
    )
    return stretto.plan(job, "h100x16")


@pytest.mark.parametrize("overlap", ["off", "window"])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_a_rank(overlap: str, axes: dict[str, int]) -> None:
    plan = plan_of(overlap, **axes)
    found = stretto.rehearse(plan, 0)
    print(overlap, axes)
    print(found)
