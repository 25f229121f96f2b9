"""Every op's time can be taken, on every place, without a trace in gradients or in the steps that follow."""

from __future__ import annotations

import copy

import pytest
import torch

from stretto.runtime.local import run_threads
from stretto.runtime.runner import Runner
from tests.runtime.equality import batch_of, job_of, lowered, model_of, traced


@pytest.mark.quiet
def test_times_of_all_ops() -> None:
    plan = lowered(job_of(traced("gpt", torch.float32), 2, 4), "1f1b")
    batch = batch_of("gpt", 4)

    def work(runner: Runner) -> None:
        for _ in range(3):  # a busy machine can spoil a measurement, never make it better thrice
            found = runner.measure_ops(batch)
            slow = max(found, key=lambda key: found[key])
            if "view" not in slow[1]:
                break
        named = {(s.index, op.name) for s in plan.job.stages for ops in s.ops.values() for op in ops}
        assert found.keys() == named
        assert all(0.0 < us < 1e6 for us in found.values())
        assert "view" not in slow[1], "the dearest op does something"
        assert all(p.grad is None for p in runner.parameters())
        runner.step(batch)
        assert runner.timeline().op_us == found
        assert all(p.grad is not None for p in runner.parameters())

    run_threads(plan, lambda _: copy.deepcopy(model_of("gpt", torch.float32)), work)
