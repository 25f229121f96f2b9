"""The pipeline race in small: every system runs, numbers agree, and the JSON is what the docs promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.pipeline import check_ranks
from benchmarks.tables import pipeline_table
from benchmarks.torch_pipelines import KINDS, TORCH_1F1B

from stretto.errors import RunError
from stretto.report.rundir import load_run
from stretto.schedule.families import FAMILIES
from tests.benchmarks.small_race import checked_rows, run_small

SMALL: dict[str, Any] = {
    "rate": "unlimited",
    "hidden": 32,
    "heads": 2,
    "sequence": 8,
    "rounds": 3,
}


def check(result: Any, families: list[str]) -> None:
    setup = result["setup"]
    bases = {"torch_best": setup["torch_best"], "torch_1f1b": TORCH_1F1B}
    rows = checked_rows(result, [*KINDS, *families], bases)
    assert rows[setup["torch_best"]]["step_s"] == min(rows[name]["step_s"] for name in KINDS)
    assert setup["bound_s"] == min(rows[name]["bound_s"] for name in families)
    for name in families:
        assert rows[name]["predicted_s"] >= rows[name]["bound_s"] * (1 - 1e-9)
        assert max(rows[name]["peak_bytes"]) > 0
    pipeline_table(result).print()  # what it prints can be printed


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_small_race_runs_every_system(tmp_path: Path, world: int) -> None:
    setup = {**SMALL, "world": world}
    result = run_small("pipeline", setup, world, tmp_path / "race.json", str(tmp_path / "kept"))
    check(result, [*FAMILIES, "auto"])
    for name in ("1f1b", "interleaved-1f1b", "dualpipev"):
        assert load_run(tmp_path / "kept" / name).measured is not None


@pytest.mark.parametrize(
    ("of_ranks", "message"),
    [
        ([(None, ["a"]), (None, ["b"])], "nowhere"),
        ([(None, ["a"]), (2.1, ["b"])], "2.1"),
        ([(None, ["a"]), (2.0, ["a", "b"])], "each parameter once"),
        ([(None, []), (2.0, ["b"])], "each parameter once"),
    ],
)
def test_a_race_of_other_numbers_is_void(of_ranks: Any, message: str) -> None:
    check_ranks("x", [(None, ["a"]), (2.0, ["b"])], 2.0, ["a", "b"])
    with pytest.raises(RunError, match=message):
        check_ranks("x", of_ranks, 2.0, ["a", "b"])
