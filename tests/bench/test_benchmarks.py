"""The scripts beside the recorded figures start, and the one of described experts prints its table."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from benchmarks import moe_described

BENCHMARKS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_finds_what_it_imports(name: str) -> None:
    assert import_module(f"benchmarks.{name}").__doc__


@pytest.mark.slow
def test_the_table_of_described_experts(capsys: pytest.CaptureFixture[str]) -> None:
    moe_described.main(2)
    _, _, *rows, chosen = capsys.readouterr().out.splitlines()
    assert len(rows) == 12
    step_ms = [float(row.split("|")[2]) for row in rows]
    assert step_ms[-1] == min(step_ms)
    assert chosen.startswith("2 chunks of the sequence")
