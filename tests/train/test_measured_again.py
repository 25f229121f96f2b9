"""A run whose costs were measured in a noisy minute: at its end they are measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.train.tiny import write_settings

import stretto
from stretto.config import load_settings
from stretto.ir.program import Job
from stretto.report.rundir import load_run
from stretto.simulating import predict
from stretto.train.trainer import Trainer
from stretto.train.world import World


def slow_plan(job: Job, cluster: str, **_: object) -> stretto.Plan:
    """By costs a thousand times too high."""
    made = stretto.plan(job, stretto.Cluster(), order="list")
    made = replace(made, costs=replace(made.costs, op_us=dict.fromkeys(made.costs.op_us, 1e6)))
    return replace(made, prediction=predict(made))


@pytest.mark.parametrize("noisy", [True, False])
def test_costs_that_no_step_could_have_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], noisy: bool
) -> None:
    def fast_plan(job: Job, cluster: str, **_: object) -> stretto.Plan:
        made = stretto.plan(job, stretto.Cluster(), order="list")
        made = replace(made, costs=replace(made.costs, op_us=dict.fromkeys(made.costs.op_us, 1e-3)))
        return replace(made, prediction=predict(made))

    monkeypatch.setattr("stretto.train.trainer.make_plan", slow_plan if noisy else fast_plan)
    settings = load_settings(write_settings(tmp_path), ["training.steps=3"])
    trainer = Trainer(settings, World())
    trainer.run()
    said = capsys.readouterr().out
    kept = settings.run_dir / "planned.json"
    run = load_run(settings.run_dir)
    planned = trainer.runner.plan
    assert run.plan is not None
    assert run.prediction is not None
    assert planned.prediction is not None
    assert run.plan.orders == planned.orders
    assert kept.exists() == noisy
    assert ("faster than the costs from before let any step be: measuring them again" in said) == noisy
    if noisy:
        assert stretto.load_plan(kept) == planned
        assert run.prediction.bound_us < 0.1 * planned.prediction.bound_us
        assert run.plan.prediction == run.prediction
    else:
        assert run.plan == planned
