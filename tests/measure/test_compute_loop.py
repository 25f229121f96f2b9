"""A stage's ops over and over: they are the step's own, and what they are said to take is the profile's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import stretto
from stretto.ir.program import Job
from stretto.measure import compute_loop
from stretto.measure.compute_loop import looped_ops
from stretto.measure.profile import OpCall, profile
from stretto.models.gpt import GPT, GPTConfig, next_token_loss

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def job() -> Job:
    model = GPT(GPTConfig(vocab_size=64, layers=1, hidden=32, heads=2, context=16))
    batch = {name: torch.zeros(2, 16, dtype=torch.int64) for name in ("input_ids", "labels")}
    return stretto.capture(model, batch, next_token_loss, stretto.Parallel(tp=2, microbatches=2))


def test_they_run_in_turn_and_say_what_they_take(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profile(job, CPU)
    ran: Counter[str] = Counter()
    run = OpCall.run

    def counted(call: OpCall, *given: object) -> None:
        ran[call.op.name] += 1
        run(call, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(OpCall, "run", counted)
    monkeypatch.setattr(compute_loop, "LITTLE_US", 1e-9)
    stage = job.stages[0]
    compute = looped_ops(job, stage, CPU, found.op_us)
    with torch.no_grad():
        pieces = [compute() for _ in range(3 * len(found.op_us))]
    names = {op.name for ops in stage.ops.values() for op in ops}
    assert set(ran) == names
    assert max(ran.values()) - min(ran.values()) <= 1, "one after the other, and again"
    done_us = sum(us * ran[name] for (_, name), us in found.op_us.items())
    assert sum(pieces) == pytest.approx(done_us, rel=0.01)


def test_a_call_runs_a_few_ops_rather_than_a_view(job: Job) -> None:
    op_us = {(0, op.name): 10.0 for ops in job.stages[0].ops.values() for op in ops}
    with torch.no_grad():
        assert looped_ops(job, job.stages[0], CPU, op_us)() == pytest.approx(compute_loop.LITTLE_US)


def test_ops_that_take_nothing_are_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="no op of stage 0 has a time"):
        looped_ops(job, job.stages[0], CPU, {})
