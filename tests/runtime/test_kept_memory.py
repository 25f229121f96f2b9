"""What ranks that keep parts need: the textbook's bytes, said by the plan, and measured."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.clusters import cores

WITHIN = 0.05
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 4": {"dp": 4},
    "dp 3, uneven rows": {"dp": 3},
    "dp 4 in groups": {"dp": 4, "dp_shard": 2},
    "dp 2, tp 2": {"dp": 2, "tp": 2},
    "dp 2, pp 2": {"dp": 2, "pp": 2},
}
FAST = (
    (1, "float32", "dp 3, uneven rows"),
    (1, "bf16", "dp 2, tp 2"),
    (1, "float32", "dp 4 in groups"),
    (2, "bf16", "dp 4 in groups"),
    (3, "float32", "dp 2, tp 2"),
    (3, "bf16", "dp 3, uneven rows"),
)

SMALL_BYTES = 2**15
"""Buckets of this model, which is a thousandth of a usual one."""


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that these lie in."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("zero", "precision", "name"),
    [
        pytest.param(*case, marks=[] if case in FAST else [pytest.mark.slow])
        for case in product((1, 2, 3), ("float32", "bf16"), LAYOUTS)
    ],
)
def test_parts_are_those_of_the_textbook_and_peaks_the_measured_ones(
    zero: Literal[1, 2, 3],
    precision: Literal["float32", "bf16"],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rajbhandari et al., "ZeRO", 2020: of n parameters a rank has, where k ranks share them, of the model's
    own values and two averages n / k each; gradients in full, from 2 on n / k; and but for 3 what the model
    computes with."""
    monkeypatch.setattr("stretto.passes.flat.LARGE_BYTES", SMALL_BYTES)
    layout = LAYOUTS[name]
    model = GPT(GPTConfig(vocab_size=130, layers=2, hidden=128, heads=4, context=4), seed=3)
    batch = torch.randint(0, 130, (2 * layout["dp"], 5), generator=torch.Generator().manual_seed(5))
    parallel = Parallel(microbatches=2, zero=zero, **layout)
    plan = stretto.plan(
        capture(model, batch, next_token_loss, parallel, precision=precision), cores(), order="list"
    )
    assert plan.prediction is not None
    share = layout.get("dp_shard", layout["dp"])
    for rank in range(plan.ranks):
        stages = set(plan.schedule.stages_of(rank))
        count = sum(p.spec.numel for p in plan.job.parameters if stages & {*p.stages})
        parts = {part: ranks[rank] for part, ranks in plan.prediction.memory.items()}
        assert sum(parts.values()) == plan.prediction.peak_bytes[rank]
        read_bytes = 4 if precision == "float32" else 2
        expected = {
            "parameters": (read_bytes * count if zero < 3 else 0) + 4 * count / share,
            "gradients": 4 * count / (share if zero > 1 else 1),
            "optimizer": 8 * count / share,
        }
        for part, nbytes in expected.items():
            assert parts[part] == pytest.approx(nbytes, rel=WITHIN), part
        assert parts["activations"] > 0

    def work(runner: stretto.Runner) -> tuple[tuple[int, ...], float]:
        optimizer = torch.optim.AdamW(runner.parameters())
        runner.step(batch)
        rows = [parameter.grad for parameter in runner.parameters() if parameter.grad is not None]
        optimizer.step()
        return runner.timeline().peak_bytes, stored(rows) / stored(runner.parameters())

    for measured, kept in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert measured == pytest.approx(plan.prediction.peak_bytes, rel=WITHIN)
        assert kept == pytest.approx(1, rel=WITHIN), "full gradients are there after the step"
