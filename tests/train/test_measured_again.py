"""A run whose costs were measured in a noisy minute: at its end they are measured again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests.train.tiny import described, train, write_settings

import stretto
from stretto.report.rundir import load_run


@pytest.mark.parametrize("op_us", [1e6, 1e-3], ids=["noisy", "quiet"])
def test_costs_that_no_step_could_have_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], op_us: float
) -> None:
    monkeypatch.setattr("stretto.train.trainer.make_plan", partial(described, op_us=op_us))
    trainer = train(write_settings(tmp_path), "training.steps=3")
    kept = trainer.settings.run_dir / "planned.json"
    run, planned, noisy = load_run(trainer.settings.run_dir), trainer.runner.plan, op_us == 1e6
    assert run.plan is not None
    assert run.prediction is not None
    assert planned.prediction is not None
    assert run.plan.orders == planned.orders
    assert kept.exists() == noisy
    assert ("measuring them again" in capsys.readouterr().out) == noisy
    if noisy:
        assert stretto.load_plan(kept) == planned
        assert run.prediction.bound_us < 0.1 * planned.prediction.bound_us
        assert run.plan.prediction == run.prediction
    else:
        assert run.plan == planned
