"""The pipeline race in small: every system runs, numbers agree, and the JSON is what the docs promise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.commands import bench
from benchmarks.pipeline import check_told
from benchmarks.pipeline_result import make_result
from benchmarks.pipeline_setup import HOSTS, Blocks, Setup, chosen, races
from benchmarks.race import Times, race
from benchmarks.tables import pipeline_table
from benchmarks.torch_pipelines import KINDS, TORCH_1F1B
from typer.testing import CliRunner

from stretto.errors import RunError, UsageError
from stretto.report.rundir import load_run
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.simulating import predict, simulate
from tests.benchmarks.small_race import run_small
from tests.synthetic import make_plan

SMALL: dict[str, Any] = {
    "rate": "unlimited",
    "hidden": 32,
    "heads": 2,
    "sequence": 8,
    "rounds": 3,
}


def check(result: Any, families: list[str]) -> None:
    rows = {row["system"]: row for row in result["rows"]}
    setup = result["setup"]
    assert list(rows) == [*KINDS, *families]
    assert 0 < setup["worst_error_vs_plain"] < 1e-5
    best = min(rows[name]["step_s"] for name in KINDS)
    assert rows[setup["torch_best"]]["step_s"] == best
    assert setup["bound_s"] == min(rows[name]["bound_s"] for name in families)
    for name, row in rows.items():
        assert len(row["rounds_s"]) == 3
        assert row["step_s"] == sorted(row["rounds_s"])[1]
        assert row["speedup_vs_torch_best"] == best / row["step_s"]
        assert row["speedup_vs_torch_1f1b"] == rows[TORCH_1F1B]["step_s"] / row["step_s"]
        assert row["ratio_to_bound"] == row["step_s"] / setup["bound_s"]
        if name in families:
            assert row["predicted_s"] >= row["bound_s"] * (1 - 1e-9)
            assert 0 <= row["exposed_s"] <= row["step_s"]
            assert max(row["peak_bytes"]) > 0
    pipeline_table(result).print()  # what it prints can be printed


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_small_race_runs_every_system(tmp_path: Path, world: int) -> None:
    setup = {**SMALL, "world": world}
    result = run_small("pipeline", setup, world, tmp_path / "race.json", str(tmp_path / "kept"))
    check(result, [*FAMILIES, "auto"])
    for name in ("1f1b", "interleaved-1f1b", "dualpipev"):
        assert load_run(tmp_path / "kept" / name).measured is not None


@pytest.mark.lab
@pytest.mark.slow
def test_the_command_in_a_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOSTS, 2, Setup(world=2, **{**SMALL, "rounds": 5}))
    out = tmp_path / "pipeline.json"
    arguments = ["pipeline", "--rate", "200mbit", "--families", "zb-v,1f1b", "--rounds", "5"]
    done = CliRunner().invoke(bench, [*arguments, "--json", str(out)])
    assert done.exception is None, done.output
    (found,) = json.loads(out.read_text())["races"]
    assert [row["system"] for row in found["rows"]] == [*KINDS, "1f1b", "zb-v"]
    assert found["setup"]["rate"] == found["setup"]["asked_rate"] == "200mbit"


def test_rows_are_over_pytorchs_best_and_over_the_least_bound(capsys: pytest.CaptureFixture[str]) -> None:
    made = {family: make_plan(make_schedule(family, 2, 4)) for family in ("1f1b", "zb-v")}
    plans = {family: replace(plan, prediction=predict(plan)) for family, plan in made.items()}
    times = {name: Times((3.0, 5.0, 4.0)) for name in KINDS}
    times["torch zb-v"] = Times((2.0, 2.0, 8.0))
    times |= {"1f1b": Times((1.0, 1.0, 1.0)), "zb-v": Times((1.0, 0.5, 0.5))}
    result = make_result(
        Setup(rounds=3), plans, times, {name: [simulate(plan)] for name, plan in plans.items()}
    )
    rows = {row["system"]: row for row in result["rows"]}
    assert result["setup"]["torch_best"] == "torch zb-v"
    assert rows["torch zb-v"]["speedup_vs_torch_1f1b"] == 2.0
    assert rows["zb-v"]["speedup_vs_torch_best"] == 4.0
    pipeline_table(result).print()
    printed = capsys.readouterr().out
    for text in ("2 hosts, 100mbit", "PyTorch's best is torch zb-v", "4.000", "8.000"):
        assert text in printed, text


@pytest.mark.slow
def test_systems_take_turns_and_the_order_rotates() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        turns: list[str] = []
        times = race({name: lambda name=name: turns.append(name) for name in "abc"}, 5)
    finally:
        dist.destroy_process_group()
    counted = turns[2 * 3 :]
    assert [counted[k : k + 3] for k in range(0, 9, 3)] == [list("abc"), list("bca"), list("cab")]
    assert {len(t.rounds) for t in times.values()} == {5}
    assert all(t.median_s >= 0 for t in times.values())


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ([(None, ["a"]), (None, ["b"])], "the loss of x is nowhere, the plain model's 2.0"),
        ([(None, ["a"]), (2.1, ["b"])], "the loss of x is 2.1, the plain model's 2.0"),
        ([(None, ["a"]), (2.0, ["a", "b"])], "do not hold the gradient of each parameter once"),
        ([(None, []), (2.0, ["b"])], "do not hold the gradient of each parameter once"),
    ],
)
def test_a_race_of_other_numbers_is_void(told: Any, message: str) -> None:
    check_told("x", [(None, ["a"]), (2.0, ["b"])], 2.0, ["a", "b"])
    with pytest.raises(RunError, match=message):
        check_told("x", told, 2.0, ["a", "b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "2"], "--rounds 2: a median on a noisy machine wants 5 rounds"),
        (["--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
        (["--hosts", "3"], "--hosts 3: '3' is none of 2, 4"),
        (["--families", "zb-v,other"], "--families zb-v,other: choose all, or of gpipe, 1f1b,"),
        (["--families", ""], "choose all, or of gpipe"),
        (["--rate", "fast"], "fast"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["pipeline", *arguments])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_setup_is_the_documented_work() -> None:
    assert chosen(["all"]) == [*FAMILIES, "auto"]
    two, four = races("100mbit", [2, 4], chosen(["zb-v", "1f1b"]), rounds=5)
    assert two.families == ["1f1b", "zb-v"], "in the order in which families are listed"
    assert (two.layers, two.microbatches) == (four.layers, four.microbatches) == (8, 8)
    assert two.cuts(2) == [4]
    assert four.cuts(8) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(UsageError, match="8 blocks make no 3 equal stages"):
        two.cuts(3)
    blocks = Blocks(two)
    assert len(blocks) == 8
    x = torch.randn(1, two.sequence, two.hidden)
    assert blocks(x).shape == x.shape
    assert x.nbytes == 512 * 1024
