"""The tensor race in small: every system runs, gradients agree, and the JSON is what the docs promise."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.commands import bench
from benchmarks.races import balanced_rate, run_races
from benchmarks.tables import tensor_table, warn_of_noise
from benchmarks.tensor_race import SHAPES, WORKER, races
from benchmarks.tensor_result import MODES, Setup
from typer.testing import CliRunner

from benchmarks import races as lab_races
from stretto.errors import RunError, UsageError
from stretto.report.rundir import load_run
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


def check(result: Any, places: int) -> None:
    rows = {row["system"]: row for row in result["rows"]}
    assert list(rows) == ["torch", "off", "local", "window"]
    setup = result["setup"]
    assert 0 < setup["worst_error_vs_plain"] < 1e-5
    assert len(setup["microbatch_work"]) == places
    off, torch = rows["off"]["step_s"], rows["torch"]["step_s"]
    for name, row in rows.items():
        assert row["step_s"] == sorted(row["rounds_s"])[1]
        assert row["speedup_vs_off"] == off / row["step_s"]
        assert row["speedup_vs_torch"] == torch / row["step_s"]
        assert row["ratio_to_bound"] == row["step_s"] / setup["bound_s"]
        if name in MODES:
            assert row["predicted_s"] >= setup["bound_s"] * (1 - 1e-9)
            assert row["planned_s"] > 0
            assert row["measured_over_predicted"] == pytest.approx(row["step_s"] / row["predicted_s"])
            assert row["overlap"] == name or row["overlap_why"]
            assert len(row["hidden"]) == len(row["exposed_s"]) == places
            shares = [1 - mine / off for mine, off in zip(row["exposed_s"], rows["off"]["exposed_s"])]
            assert row["hidden"] == pytest.approx(shares)
            assert all(0 <= us <= row["step_s"] for us in row["exposed_s"])
            assert all(peak > 0 for peak in row["peak_bytes"])
    assert rows["off"]["hidden"] == [0.0] * places
    tensor_table(result).print()  # what it prints can be printed


@pytest.mark.slow
def test_small_race_runs_every_system(tmp_path: Path) -> None:
    check(run_small(tmp_path / "race.json"), places=1)


@pytest.mark.slow
def test_small_race_with_sequence_parallelism(tmp_path: Path) -> None:
    check(run_small(tmp_path / "race.json", sequence_parallel=True), places=1)


@pytest.mark.slow
def test_small_race_in_a_pipeline_keeps_what_ran(tmp_path: Path) -> None:
    result = run_small(tmp_path / "race.json", str(tmp_path / "kept"), pp=2)
    check(result, places=2)
    rows = {row["system"]: row for row in result["rows"]}
    for mode in MODES:
        run = load_run(tmp_path / "kept" / mode)
        assert run.plan is not None
        assert run.prediction is not None
        assert run.measured is not None
        assert run.prediction.step_us == pytest.approx(1e6 * rows[mode]["predicted_s"])
        assert run.measured.ranks == 2


@pytest.mark.slow
def test_a_probe_finds_the_work_of_every_place(tmp_path: Path) -> None:
    (work,) = run_small(tmp_path / "probe.json", "probe")
    layers, rows_nbytes = 2, 32 * 128 * 4
    # The embedding, two sums a block forward and two backward, the head's input gradient.
    assert work["wire_bytes"] >= (2 + 4 * layers) * rows_nbytes
    assert work["wire_bytes"] < 1.1 * (2 + 4 * layers) * rows_nbytes
    assert work["compute_us"] > 0
    assert work["collective_us"] > 0


def place(
    compute_us: float, collective_us: float, wire_bytes: float, message_bytes: float = 0.0
) -> dict[str, float]:
    return {
        "compute_us": compute_us,
        "collective_us": collective_us,
        "wire_bytes": wire_bytes,
        "message_bytes": message_bytes,
    }


@pytest.mark.parametrize(
    ("places", "rate"),
    [
        ([place(8e5, 1e4, 3.14159e7)], "310mbit"),
        ([place(8e6, 1e4, 3.14159e7)], "31mbit"),
        ([place(8e7, 1e4, 3.14159e7)], "3.1mbit"),
        ([place(8e4, 1e4, 3.14159e7)], "3100mbit"),
        ([place(8e5, 1e4, 2e7, 1.14159e7)], "310mbit"),
        # The place with most compute counts.
        ([place(1e5, 1e4, 3.14159e7), place(8e5, 1e4, 3.14159e7)], "310mbit"),
        # Even a network without limit is slower than compute.
        ([place(8e5, 9e5, 3.14159e7)], "unlimited"),
    ],
)
def test_the_balanced_rate(places: list[dict[str, float]], rate: str) -> None:
    assert balanced_rate(places) == rate


def test_races_are_the_documented_work() -> None:
    found = races(["50mbit", "balanced"], [1024, 2048], [1, 2], sequence_parallel=True, rounds=7)
    assert len(found) == 8
    assert {(s.hidden, s.layers, s.microbatch) for s in found} == {(1024, 3, 2), (2048, 2, 1)}
    assert {(s.sequence, s.microbatches, s.tp, s.dtype) for s in found} == {(256, 8, 2, "float32")}
    assert {s.world for s in found} == {2, 4}
    assert all(s.sequence_parallel and s.rounds == 7 for s in found)
    assert SHAPES[1024].cuts == ()
    assert {s.cuts for s in found if s.pp == 2} == {(2,), (1,)}
    assert Setup(**asdict(found[0])) == found[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "2"], "--rounds 2: a median on a noisy machine wants 3 rounds or more"),
        (["--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
        (["--rate", "balanced,fast"], "--rate 'fast': expected a number and kbit, mbit or gbit"),
        (["--hidden", "512"], "--hidden 512: '512' is none of 1024, 2048"),
        (["--pp", "1,3"], "--pp 1,3: '3' is none of 1, 2"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["tensor", *arguments])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_the_table_names_what_was_taken_instead(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "system": "window",
        "overlap": "off",
        "step_s": 2.0,
        "speedup_vs_off": 1.0,
        "speedup_vs_torch": 1.5,
        "ratio_to_bound": 1.25,
        "rounds_s": [2.0, 2.0, 2.5],
        "measured_over_predicted": 2.0 / 1.9,
        "predicted_s": 1.9,
        "exposed_s": [0.1, 0.3],
        "hidden": [0.5, None],
    }
    setup = {**asdict(Setup(pp=2)), "communication_over_compute": 1.0, "bound_s": 1.6, "binds": "compute"}
    tensor_table({"setup": setup, "rows": [row]}).print()
    warn_of_noise([row])
    quick = {**row, "step_s": 1.5, "ratio_to_bound": 1.5 / 1.6}
    tensor_table({"setup": setup, "rows": [row, quick]}).print()
    printed = capsys.readouterr()
    told = " ".join(printed.out.split())
    assert told.count("below it, as its costs are too high: window") == 1
    for text in ("window (as off)", "2.000", "1.500", "1.250", "+5.3%", "0.300", "50%,"):
        assert text in printed.out, text
    assert "The rounds of window spread by more than 15 %" in printed.err


def test_races_that_ended_are_kept_when_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def in_lab(module: str, setup: Setup, *words: str) -> Any:
        assert module == WORKER
        said.extend(words)
        if setup.hidden == 2048:
            raise RunError("host 1 failed")
        return {"setup": {"hidden": setup.hidden}, "rows": []}

    monkeypatch.setattr(lab_races, "in_lab", in_lab)
    kept: list[Any] = []
    setups = races(["50mbit"], [1024, 2048], [1], sequence_parallel=False, rounds=3)
    with pytest.raises(RunError, match="host 1"):
        run_races(WORKER, setups, lambda _: None, kept.append, tmp_path)
    assert [race["setup"]["hidden"] for result in kept for race in result["races"]] == [1024]
    assert said[0] == str(tmp_path / "hidden-1024-pp=1-tp=2-50mbit")
