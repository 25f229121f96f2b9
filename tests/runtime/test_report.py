"""`runner.report()` tells what is known: the prediction, where no step was measured or can be read."""

from __future__ import annotations

import pytest
import torch

import stretto
from stretto.runtime.record import HostClock
from tests.capturing.zoo import Chain, mean_square, rows
from tests.clusters import cores


def made() -> stretto.Runner:
    model = Chain()
    job = stretto.capture(model, rows(), mean_square, stretto.Parallel(microbatches=2))
    plan = stretto.plan(job, cores())
    (runner,) = stretto.run_threads(plan, lambda _: model, lambda runner: runner)
    return runner


def test_before_a_step_it_is_the_prediction() -> None:
    found = made().report()
    assert found.measured is None
    head, step, *rest = str(found).splitlines()
    assert head.endswith("predicted; not measured: there is no measured step yet: call step(batch) first")
    assert step.split()[0] == "step"
    assert step.split()[-1] == "-"
    assert any("peak memory" in line for line in rest)


def test_marks_that_cannot_be_read_leave_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an accelerator's events may not be, after an error that the script has dealt with."""
    runner = made()
    runner.step(rows())

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("an event was lost")

    monkeypatch.setattr(HostClock, "read", broken)
    found = runner.report()
    assert "predicted; not measured: AcceleratorError: " in str(found)
    assert "rank 0 compute" in str(found)
    monkeypatch.undo()
    assert runner.report().measured is not None
    assert "predicted, measured" in str(runner.report())
