"""Values are freed: nothing of a step outlives it but gradients, and memory does not grow over steps."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto
from stretto.capturing import capture
from stretto.capturing.trace import trace
from stretto.config import Parallel
from stretto.ir.plan import Plan
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from tests.capturing.zoo import Chain, mean_square, rows
from tests.families import ONE_STAGE
from tests.runtime.equality import evenly, gpt, made_up_costs, plan_of, tokens
from tests.synthetic_comm import make_comm_costs


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("1f1b", "zb-h2") else pytest.mark.slow) for f in ONE_STAGE]
)
def test_nothing_of_a_step_outlives_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that is sent or received or kept for a later window is gone when the step is."""
    model, batch = gpt(True), tokens(4, columns=8)
    seen: list[weakref.ref[Tensor]] = []
    traced = trace(model, batch, next_token_loss, microbatches=4)
    plan = plan_of(evenly(traced, 4, 4), family)

    def work(runner: stretto.Runner) -> None:
        send, wait = runner.state.send, runner.state.wait

        def sent(edge: int, microbatch: int, value: Tensor) -> None:
            seen.append(weakref.ref(value))
            send(edge, microbatch, value)

        def waited(edge: int, microbatch: int) -> Tensor:
            value = wait(edge, microbatch)
            seen.append(weakref.ref(value))
            return value

        runner.state.send, runner.state.wait = sent, waited  # type: ignore[method-assign]
        runner.step(batch)

    stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    gc.collect()
    assert len(seen) >= 2 * len(plan.job.edges) * 4
    assert not [ref for ref in seen if ref() is not None]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_resident_memory_is_flat_over_two_hundred_steps() -> None:
    model, batch = Chain(), rows(512)
    plan = plan_of(evenly(trace(model, batch, mean_square, microbatches=2), 2, 2), "zb-h2")
    resident: list[int] = []

    def work(runner: stretto.Runner) -> None:
        for step in range(200):
            runner.step(batch)
            for parameter in runner.parameters():
                parameter.grad = None
            if runner.rank == 0 and step in (49, 199):
                resident.append(resident_bytes())

    stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    # A leak of one activation (16 KiB) a microbatch would be 4.7 MiB.
    assert resident[1] - resident[0] < 2 * 2**20


def peaks_with_adamw(plan: Plan, model: torch.nn.Module, batch: Tensor) -> tuple[int, ...]:
    """What ranks need at most, by pipeline rank, after a step of AdamW."""

    def work(runner: stretto.Runner) -> tuple[int, ...]:
        runner.step(batch)
        optimizer = torch.optim.AdamW(runner.parameters())
        optimizer.step()
        return runner.timeline().peak_bytes

    return stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)[0]


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 2, "dp": 2},
)
FAST = (("float32", 3),)


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        # Two layouts in one of the two, the others in the longer run: they are parts of the third.
        pytest.param(p, layout, marks=[] if (p, k) in FAST else [pytest.mark.slow])
        for p in ("float32", "bf16")
        for k, layout in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_measured_peaks_of_layouts_are_the_predicted_ones(layout: dict[str, Any], precision: Any) -> None:
    """Collectives, gradient reductions and gradients of another dtype are counted as they are. What remains
    is the batch, which is not counted."""
    model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=64, heads=4, context=32), seed=3)
    batch = torch.randint(0, 64, (8, 33), generator=torch.Generator().manual_seed(5))
    job = capture(model, batch, next_token_loss, Parallel(microbatches=4, **layout), precision=precision)
    costs = replace(made_up_costs(job), collectives=make_comm_costs(job).collectives)
    for choice in ("none", "full"):
        plan = make_plan(replace(job, recompute=choice), costs, schedule="1f1b")
        assert plan.prediction is not None
        measured = peaks_with_adamw(plan, model, batch)
        assert measured == pytest.approx(plan.prediction.peak_bytes, rel=0.01), choice
