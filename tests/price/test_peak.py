"""The peak rate that MFU is counted by: of described clusters, and of devices that the catalogue knows."""

from __future__ import annotations

import pytest
import torch

import stretto
from stretto.capturing import capture
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.price.devices import CALLED, FP32_PART, device_peak, devices, named_peak
from stretto.report.tables import rates_grid
from tests.clusters import cores


def job_of(precision: str, recompute: str = "none") -> Job:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=64, heads=4, context=32))
    batch = torch.zeros(4, 33, dtype=torch.int64, device="meta")
    how = stretto.Parallel(microbatches=2, recompute=recompute)
    return capture(model, batch, next_token_loss, how, precision=precision, device="cuda")  # type: ignore[arg-type]


def test_names_are_of_the_catalogue() -> None:
    assert set(CALLED.values()) <= set(devices())


def test_the_peak_is_that_of_the_dtypes() -> None:
    half = named_peak(job_of("bf16"), "NVIDIA H200")
    assert half is not None
    assert half.flops_per_us == pytest.approx(989e6)
    assert "H200" in half.source
    full = device_peak(job_of("float32"), devices()["h200"])
    assert full.flops_per_us == pytest.approx(989e6 * FP32_PART)
    assert named_peak(job_of("bf16"), "NVIDIA H100 PCIe") is None
    assert named_peak(job_of("bf16"), "this processor, 2 threads") is None


def test_a_plan_of_a_described_cluster_has_an_mfu() -> None:
    plan = stretto.plan(job_of("bf16", "full"), "h100x1", order="list")
    work = plan.work
    assert plan.prediction is not None
    step_us = plan.prediction.step_us
    mfu, hfu = work.mfu(step_us), work.hfu(step_us)
    assert mfu is not None
    assert hfu is not None
    assert 0.0 < mfu < hfu < 1.0
    # By hand: products of two layers and the head and attention's, forward and twice that backward.
    tokens, hidden, layers, context, vocab = 4 * 32, 64, 2, 32, 64
    products = 6.0 * tokens * (layers * 12 * hidden**2 + vocab * hidden)
    attention = tokens * layers * context * hidden * (4 + 8)
    assert work.flops == pytest.approx(products + attention, rel=0.01)
    grid = rates_grid(work, [stretto.simulate(plan)], 1)
    assert grid is not None
    assert {"MFU", "HFU"} <= {row[0] for row in grid.rows}
    flat = stretto.plan(job_of("float32"), cores(peak_tflops=0.1), order="list")
    assert flat.costs.peak is not None
    assert flat.costs.peak.flops_per_us == 1e5
