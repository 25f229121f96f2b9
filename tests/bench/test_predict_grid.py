"""The grid of predicted against measured: what is kept when a lab fails, and what stands in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stretto.bench import predict_grid
from stretto.bench.predict import FIGURES, SHAPES, Cell, Found
from stretto.bench.predict_grid import run_grid
from stretto.cli.bench import bench
from stretto.errors import RunError, UsageError

CELLS = [Cell(shape, 2, 1, rate) for rate in ("100mbit", "50mbit") for shape in SHAPES[:2]]


def found(cell: Cell, measured_ms: float) -> Found:
    return Found(str(cell), 90.0, 95.0, measured_ms, (measured_ms,) * 3, 0.2, 0.1, (100, 50), (100, 40))


def labs(monkeypatch: pytest.MonkeyPatch, *, failing: str = "") -> None:
    """Labs in which every cell takes 100 ms; the one with a rate of `failing` fails."""

    def run(cells: Sequence[tuple[Cell, Sequence[Cell]]], rounds: int, folder: Path) -> None:
        if cells[0][0].rate == failing:
            raise RunError("a rank failed")
        for cell, _ in cells:
            cell.folder(folder).mkdir()
            (cell.folder(folder) / FIGURES).write_text(json.dumps(asdict(found(cell, 100.0))))

    monkeypatch.setattr(predict_grid, "_run_lab", run)
    monkeypatch.setattr(predict_grid, "load_plan", lambda path: None)


def test_what_was_measured_before_a_lab_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs(monkeypatch, failing="50mbit")
    kept: list[dict[str, Any]] = []
    with pytest.raises(RunError):
        run_grid(CELLS, 3, tmp_path, lambda text: None, kept.append)
    assert [[row["cell"] for row in one["rows"]] for one in kept] == [list(map(str, CELLS[:2]))]
    assert kept[0]["summary"]["cells"] == 2
    assert kept[0]["summary"]["worst_step_error_pct"] == pytest.approx(-5.0)
    assert kept[0]["summary"]["worst_peak_error_pct"] == pytest.approx(25.0)
    json.dumps(kept[0])


def test_after_the_last_lab_cells_stand_in_the_grids_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labs(monkeypatch)
    monkeypatch.setattr(predict_grid, "_transfer", lambda *given: {})
    kept: list[dict[str, Any]] = []
    mixed = [CELLS[at] for at in (0, 2, 1, 3)]
    result = run_grid(mixed, 3, tmp_path, lambda text: None, kept.append)
    assert [row["cell"] for row in result["rows"]] == list(map(str, mixed))
    assert [len(one["rows"]) for one in kept] == [2, 4]
    assert result["setup"]["rounds"] == 3


def test_the_layouts_that_are_asked_for_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Cell] = []

    def run(cells: list[Cell], *_: Any) -> dict[str, Any]:
        asked.extend(cells)
        return {"rows": [], "summary": {}}

    monkeypatch.setattr(predict_grid, "run_grid", run)
    done = CliRunner().invoke(bench, ["predict", "--pp", "2", "--tp", "1,2", "--rates", "1gbit"])
    assert done.exit_code == 0, done.output
    assert {(cell.pp, cell.tp, cell.rate) for cell in asked} == {(2, 1, "1gbit"), (2, 2, "1gbit")}
    refused = CliRunner().invoke(bench, ["predict", "--pp", "3"])
    assert isinstance(refused.exception, UsageError)
    assert "--pp 3: '3' is none of 1, 2" in str(refused.exception)


def test_what_ran_is_kept_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def run(cells: list[Cell], rounds: int, folder: Path, *_: Any) -> dict[str, Any]:
        asked.append(folder)
        return {"rows": [], "summary": {}}

    monkeypatch.setattr(predict_grid, "run_grid", run)
    wanted = tmp_path / "kept" / "here"
    assert CliRunner().invoke(bench, ["predict", "--keep", str(wanted)]).exit_code == 0
    assert asked == [wanted.resolve()]
    assert wanted.is_dir()
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(bench, ["predict", "--keep", str(tmp_path / "file")])
    assert isinstance(refused.exception, UsageError)
    assert "--keep" in str(refused.exception)
    assert asked == [wanted.resolve()], "refused before the first lab"
