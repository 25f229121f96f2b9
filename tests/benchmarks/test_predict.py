"""The grid of measured against predicted: what is kept when a lab fails, and what is in the end."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.predict import SHAPES, CellResult, GridCell, GridLab, grid, run_cell, run_grid
from benchmarks.racing import keep_run

from benchmarks import predict
from stretto.errors import RunError
from stretto.ir.serialize import load_plan
from stretto.lab import Lab
from stretto.report.rundir import load_run

CELLS = [replace(shape, pp=2, tp=1, rate=rate) for rate in ("100mbit", "50mbit") for shape in SHAPES[:2]]


def found(cell: GridCell, measured_ms: float) -> CellResult:
    return CellResult(str(cell), 90.0, 95.0, measured_ms, (measured_ms,) * 3, 0.2, 0.1, (100, 50), (100, 40))


def labs(monkeypatch: pytest.MonkeyPatch, *, failing: str = "") -> None:
    """Labs in which every cell takes 100 ms; the one with a rate of `failing` fails."""

    def run(lab: Lab, module: str, setup: dict[str, Any], *, what: str) -> list[dict[str, Any]]:
        if lab.rate == failing:
            raise RunError("a rank failed")
        return [asdict(found(cell, 100.0)) for cell in GridLab(**setup).made()]

    monkeypatch.setattr(predict, "result_of", run)


def test_what_was_measured_before_a_lab_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs(monkeypatch, failing="50mbit")
    kept: list[dict[str, Any]] = []
    with pytest.raises(RunError):
        run_grid(CELLS, 3, tmp_path, lambda text: None, kept.append)
    assert [[row["cell"] for row in one["rows"]] for one in kept] == [list(map(str, CELLS[:2]))]
    assert kept[0]["summary"]["cells"] == 2
    assert kept[0]["summary"]["worst_step_difference_pct"] == pytest.approx(100 / 95 * 100 - 100)
    assert kept[0]["summary"]["worst_peak_difference_pct"] == pytest.approx(-20.0)
    json.dumps(kept[0])


def test_the_grid_has_every_layout_and_rate() -> None:
    cells = grid()
    assert {(c.pp, c.tp) for c in cells} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert {c.rate for c in cells if c.world == 1} == {"unlimited"}
    assert {c.rate for c in cells} == {"50mbit", "100mbit", "200mbit", "1gbit", "unlimited"}
    assert {c.sequence_parallel for c in cells if c.tp == 2} == {False, True}
    assert len(set(cells)) == len(cells) == 4 + 3 * 5 * 4


@pytest.mark.slow
def test_a_cell_is_predicted_again_by_its_costs_after_the_steps(tmp_path: Path) -> None:
    cell = GridCell(
        name="tiny", hidden=32, layers=1, heads=2, sequence=8, vocab=64, microbatch=1, microbatches=2, tp=1
    )
    found, made, again, timelines = run_cell(cell, 3)
    keep_run(tmp_path, made, again, timelines)
    run = load_run(tmp_path)
    assert run.plan is not None
    assert run.measured is not None
    plan, planned = run.plan, load_plan(tmp_path / "planned.json")
    assert plan.prediction is not None
    assert planned.prediction is not None
    assert planned.prediction.step_us / 1e3 == pytest.approx(found.planned_ms)
    assert planned.windows == plan.windows, "the order that was made is the one that ran"
    steps_us = sorted(timeline.step_us for timeline in timelines)
    assert 0 < steps_us[0] * (1 - 1e-6) <= run.measured.step_us <= steps_us[-1] * (1 + 1e-6)
    assert steps_us[0] / 1e3 <= max(found.rounds_ms), "a step's timeline is a part of the time that it took"
    assert found.predicted_ms == pytest.approx(plan.prediction.step_us / 1e3)
    assert found.planned_ms != found.predicted_ms, "ops took another time when the plan was made"
    assert len(found.rounds_ms) == 3
    assert found.peak_measured == pytest.approx(plan.prediction.peak_bytes, rel=0.01)


def test_figures_of_a_cell() -> None:
    found = CellResult("a", 90.0, 110.0, 100.0, (100.0,), 0.25, 0.2, (105, 90), (100, 100))
    assert found.difference == pytest.approx(-1 / 11)
    assert found.planned_difference == pytest.approx(1 / 9)
    assert found.exposed_points == pytest.approx(-5.0)
    assert found.peak_difference == pytest.approx(1 / 9)
    cell = replace(SHAPES[0], pp=2, tp=2, rate="50mbit")
    assert GridCell(**json.loads(json.dumps(asdict(cell)))) == cell
    assert str(cell) == "wide pp=2 tp=2 50mbit"
