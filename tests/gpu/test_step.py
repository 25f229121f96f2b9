"""A step on an accelerator: it is queued without a wait, and marked by the device's own clock."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

import stretto
from stretto.config import Parallel
from stretto.ir.timeline import COMPUTE_LANE, SpanKind
from stretto.measure.profile import profile
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
from stretto.models.moe import MoEConfig, MoEGPT, moe_token_sum
from tests.clusters import cores
from tests.gpu.test_numbers import batch, gpt, moe

pytestmark = pytest.mark.gpu

CASES: dict[str, tuple[Any, Any, Parallel]] = {
    "gpt": (gpt, next_token_sum, Parallel(microbatches=2)),
    "capacity": (lambda: moe(1.0), moe_token_sum, Parallel(microbatches=2, ampipe_degree=2)),
    "dropless": (lambda: moe(None), moe_token_sum, Parallel(microbatches=2, ampipe_degree=2)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_queued_without_a_wait(name: str) -> None:
    made, loss, parallel = CASES[name]
    model = made().to("cuda", torch.bfloat16)
    plan = stretto.plan(stretto.capture(model, batch(), loss=loss, parallel=parallel), "h100x1")
    runner = stretto.Runner(plan, model)
    data = batch()
    runner.step(data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = runner.step(data)  # raises where the host waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(pp=2, microbatches=4), Parallel(tp=2)], ids=str)
def test_its_timeline_is_the_devices(parallel: Parallel) -> None:
    model = gpt().to("cuda", torch.float32)
    job = stretto.capture(model, batch(), loss=next_token_sum, parallel=parallel)
    plan = stretto.plan(job, cores(latency_us=20.0, link_gbps=0.05))

    def work(runner: stretto.Runner) -> tuple[str, stretto.Timeline]:
        for _ in range(3):
            runner.step(batch())
        return str(runner.report()), runner.timeline()

    for said, found in stretto.run_threads(plan, lambda _: copy.deepcopy(model), work):
        assert "peak memory" in said
        assert found.step_us > 0
        for place in range(plan.ranks):
            lane = [s for s in found.spans if s.rank == place and s.lane == COMPUTE_LANE]
            assert any(span.kind is SpanKind.COMPUTE for span in lane)
            # Threads share a stream here, so that what a rank sees is the others' work too.
            assert sum(s.end_us - s.start_us for s in lane) == pytest.approx(found.step_us, rel=0.02)


def test_what_is_measured_is_what_a_step_takes() -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(vocab_size=32000, layers=2, hidden=2048, heads=16, context=2048), seed=3)
    data = torch.randint(0, 32000, (16, 2049), device="cuda")
    parallel = Parallel(microbatches=4)
    job = stretto.capture(model, data, loss=next_token_sum, parallel=parallel, precision="bf16")
    found = profile(job, torch.device("cuda"))
    runner = stretto.Runner(stretto.plan(job, "h100x1"), model)
    for _ in range(6):
        model.zero_grad()
        runner.step(data)
    step_us = runner.timeline().step_us
    print(f"measured {4 * sum(found.op_us.values()) / 1000:.1f} ms, a step {step_us / 1000:.1f} ms")
    assert 4 * sum(found.op_us.values()) == pytest.approx(step_us, rel=0.08)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_a_step_of_experts_takes_what_its_ops_take(capacity: float | None) -> None:
    """No op takes many times what its traffic and products would, as gradients of gathered rows once did."""
    config = MoEConfig(
        vocab_size=8192,
        layers=2,
        hidden=1024,
        heads=8,
        context=2048,
        experts=16,
        top_k=4,
        expert_ratio=1.0,
        capacity_factor=capacity,
    )
    with torch.device("cuda"):
        model = MoEGPT(config, seed=1)
    data = torch.randint(0, 8192, (8, 2049), device="cuda")
    job = stretto.capture(
        model, data, loss=moe_token_sum, parallel=Parallel(microbatches=2), precision="bf16"
    )
    plan = stretto.plan(job, "h200x1")
    measured = profile(job, torch.device("cuda"))
    slowest = max(measured.op_us.items(), key=lambda item: item[1] - plan.costs.op_us[item[0]])
    print(slowest, plan.costs.op_us[slowest[0]])
    assert slowest[1] < 0.1 * sum(measured.op_us.values())


def test_the_allocator_holds_what_is_predicted() -> None:
    """In a process of its own: others' tensors are counted too."""
    code = """
import torch, stretto
from stretto.models.gpt import GPT, GPTConfig, next_token_sum
with torch.device("cuda"):
    model = GPT(GPTConfig(vocab_size=32000, layers=4, hidden=2048, heads=16, context=2048), seed=3)
data = torch.randint(0, 32000, (16, 2049), device="cuda")
job = stretto.capture(
    model, data, loss=next_token_sum, parallel=stretto.Parallel(microbatches=4), precision="bf16"
)
plan = stretto.plan(job, "h200x1")
runner = stretto.Runner(plan, model)
optimizer = torch.optim.AdamW(runner.parameters(), fused=True)
runner.step(data)
optimizer.step()
optimizer.zero_grad()
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
runner.step(data)
optimizer.step()
torch.cuda.synchronize()
print(before, torch.cuda.max_memory_allocated(), plan.prediction.peak_bytes[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, most, predicted = map(int, done.stdout.split()[-3:])
    print(f"{before / 2**20:.0f} MiB before, {most / 2**20:.0f} at most, {predicted / 2**20:.0f} predicted")
    assert most == pytest.approx(predicted, rel=0.25)
