"""The tensor race in small: every system runs, gradients agree, and the JSON is what the docs promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.tables import tensor_table
from benchmarks.tensor import MODES, TORCH

from stretto.report.rundir import load_run
from tests.benchmarks.small_race import checked_rows
from tests.benchmarks.small_race import run_small as run_race

SMALL = {
    "hidden": 128,
    "heads": 4,
    "layers": 2,
    "vocab": 256,
    "sequence": 32,
    "microbatch": 1,
    "microbatches": 4,
    "rounds": 3,
}


def run_small(out: Path, *words: str, **changes: Any) -> Any:
    setup = {**SMALL, **changes}
    return run_race("tensor", setup, setup.get("pp", 1) * 2, out, *words)


def check(result: Any, ranks: int) -> None:
    rows = checked_rows(result, [TORCH, *MODES], {"off": "off", "torch": TORCH})
    assert len(result["setup"]["microbatch_work"]) == ranks
    for name in MODES:
        row = rows[name]
        assert row["predicted_s"] >= result["setup"]["bound_s"] * (1 - 1e-9)
        assert row["planned_s"] > 0
        assert row["measured_over_predicted"] == pytest.approx(row["step_s"] / row["predicted_s"])
        assert row["overlap"] == name or row["overlap_why"]
        shares = [1 - mine / off for mine, off in zip(row["exposed_s"], rows["off"]["exposed_s"])]
        assert row["hidden"] == pytest.approx(shares)
        assert all(peak > 0 for peak in row["peak_bytes"])
    assert rows["off"]["hidden"] == [0.0] * ranks
    tensor_table(result).print()  # what it prints can be printed


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_small_race_runs_every_system(tmp_path: Path, sequence_parallel: bool) -> None:
    check(run_small(tmp_path / "race.json", sequence_parallel=sequence_parallel), ranks=1)


@pytest.mark.slow
def test_small_race_in_a_pipeline_keeps_what_ran(tmp_path: Path) -> None:
    result = run_small(tmp_path / "race.json", str(tmp_path / "kept"), pp=2)
    check(result, ranks=2)
    rows = {row["system"]: row for row in result["rows"]}
    for mode in MODES:
        run = load_run(tmp_path / "kept" / mode)
        assert run.plan is not None
        assert run.prediction is not None
        assert run.measured is not None
        assert run.prediction.step_us == pytest.approx(1e6 * rows[mode]["predicted_s"])
        assert run.measured.ranks == 2


@pytest.mark.slow
def test_a_probe_finds_the_work_of_every_rank(tmp_path: Path) -> None:
    (work,) = run_small(tmp_path / "probe.json", "probe")
    layers, rows_nbytes = 2, 32 * 128 * 4
    # The embedding, two sums a block forward and two backward, the head's input gradient.
    assert work["wire_bytes"] >= (2 + 4 * layers) * rows_nbytes
    assert work["wire_bytes"] < 1.1 * (2 + 4 * layers) * rows_nbytes
    assert work["compute_us"] > 0
    assert work["collective_us"] > 0
