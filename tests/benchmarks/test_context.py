"""The race of long sequences in small: every system runs, gradients agree, and the JSON is what the docs
promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.context import BLOCKING, RING, SYSTEMS, TORCH_RING
from benchmarks.tables import context_table
from benchmarks.torch_context import ROTATIONS

from stretto.report.rundir import load_run
from tests.benchmarks.small_race import checked_rows, run_small

SMALL: dict[str, Any] = {
    "hidden": 32,
    "heads": 4,
    "layers": 1,
    "vocab": 64,
    "sequence": 64,
    "rounds": 3,
}


def check(result: Any) -> None:
    bases = {"blocking": BLOCKING, "torch_ring": TORCH_RING}
    rows = checked_rows(result, [*ROTATIONS, *SYSTEMS], bases)
    for name, system in SYSTEMS.items():
        row = rows[name]
        assert row["overlap"] == system.overlap or row["overlap_why"]
        assert ("hidden" in row) == (system.kind == RING)
        assert row["peak_bytes"] > 0
    blocking = rows[BLOCKING]["exposed_messages_s"]
    assert 0 < blocking <= rows[BLOCKING]["exposed_s"]
    assert rows[RING]["hidden"] == pytest.approx(1 - rows[RING]["exposed_messages_s"] / blocking)
    context_table(result).print()  # what it prints can be printed


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_small_race_runs_every_system(tmp_path: Path, cp: int) -> None:
    result = run_small("context", {**SMALL, "cp": cp}, cp, tmp_path / "race.json", str(tmp_path / "kept"))
    check(result)
    for name in SYSTEMS:
        assert load_run(tmp_path / "kept" / name).measured is not None


@pytest.mark.slow
def test_a_probe_finds_the_work_of_a_microbatch(tmp_path: Path) -> None:
    (work,) = run_small("context", {**SMALL, "cp": 2}, 2, tmp_path / "probe.json", "probe")
    pair = 2 * 32 * 32 * 4  # keys and values of a rank's tokens
    # There, again in the backward, and the gradients home; beside them a few numbers of the loss.
    assert 3 * pair <= work["wire_bytes"] < 3 * pair + 100
    assert work["compute_us"] > 0
    assert work["collective_us"] > 0
