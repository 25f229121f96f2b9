"""Races in labs: what a worker takes and what is read back, the balanced rate, what is kept and printed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.commands import bench
from benchmarks.labs import CORES, balanced_rate, run_races
from benchmarks.tables import (
    compute_table,
    moe_table,
    pipeline_table,
    predict_table,
    published_table,
    reshard_table,
    tensor_table,
    unet_table,
)
from benchmarks.tensor import WORKER, TensorRace, races
from benchmarks.work import RankWork
from typer.testing import CliRunner

from benchmarks import labs, moe, pipeline, unet
from stretto.errors import RunError
from tests.benchmarks import test_moe, test_pipeline, test_unet

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


# --- races in labs ------------------------------------------------------------------------------------


def work(compute_us: float, wire_bytes: float, message_bytes: float = 0.0, collective_us: float = 1e4) -> Any:
    return asdict(RankWork(compute_us, collective_us, wire_bytes, message_bytes))


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        ([work(8e5, 3.14159e7)], "310mbit"),
        ([work(8e4, 3.14159e7)], "3100mbit"),
        ([work(8e5, 2e7, 1.14159e7)], "310mbit"),
        # The rank with most compute counts.
        ([work(1e5, 3.14159e7), work(8e5, 3.14159e7)], "310mbit"),
        # Even a network without limit is slower than compute.
        ([work(8e5, 3.14159e7, collective_us=9e5)], "unlimited"),
    ],
)
def test_the_balanced_rate(ranks: list[dict[str, float]], rate: str) -> None:
    assert balanced_rate(ranks) == rate


def test_races_that_ended_are_kept_when_a_later_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def in_lab(module: str, setup: TensorRace, kept: str) -> Any:
        assert module == WORKER
        asked.append(kept)
        if setup.hidden == 2048:
            raise RunError("host 1 failed")
        return {"setup": {"hidden": setup.hidden}, "rows": []}

    monkeypatch.setattr(labs, "in_lab", in_lab)
    kept: list[Any] = []
    setups = races(["50mbit"], [1024, 2048], [1], sequence_parallel=False, rounds=3)
    with pytest.raises(RunError, match="host 1"):
        run_races(WORKER, setups, lambda _: None, kept.append, tmp_path)
    assert [race["setup"]["hidden"] for result in kept for race in result["races"]] == [1024]
    assert asked[0] == str(tmp_path / "hidden-1024-pp=1-tp=2-50mbit")


@pytest.mark.parametrize(
    ("name", "file", "more"),
    [
        ("tensor", "tensor-1024", ["--hidden", "1024", "--pp", "1"]),
        ("moe", "moe-4-hosts", ["--hosts", "4", "--routing", "router"]),
        ("unet", "unet-balanced", []),
    ],
)
def test_a_race_at_the_balanced_rate_is_probed_run_printed_and_written(
    name: str, file: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race, asked = recorded(file)["races"][0], []

    def in_lab(module: str, setup: Any, kept: str) -> Any:
        asked.append((module, setup.rate, kept))
        return [work(8e5, 3.14159e7)] if kept == "probe" else race

    monkeypatch.setattr(labs, "in_lab", in_lab)
    monkeypatch.setattr("benchmarks.unet.find_spec", lambda name: "there")
    out = tmp_path / "race.json"
    done = CliRunner().invoke(bench, [name, *more, "--json", str(out)])
    assert done.exception is None, done.output
    assert asked == [(name, "unlimited", "probe"), (name, "310mbit", "")]
    read = json.loads(out.read_text())
    assert read["races"] == [race]
    assert race["setup"]["asked_rate"] == "balanced"
    assert read["cores"] == CORES
    assert read.get("version", 2) == 2
    assert all(row["system"].split()[0] in done.output for row in race["rows"])


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("pipeline", ["--families", "zb-v,1f1b", "--rounds", "5"]),
        ("moe", ["--routing", "balanced"]),
        ("unet", ["--rounds", "3"]),
    ],
)
def test_a_command_in_a_lab(
    name: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        pipeline.HOSTS, 2, pipeline.PipelineRace(world=2, **{**test_pipeline.SMALL, "rounds": 5})
    )
    monkeypatch.setitem(moe.SHAPES, 2, moe.MoeRace(ep=2, **test_moe.SMALL))
    if name == "unet":
        test_unet.needs_diffusers()
        small = unet.UNetRace
        monkeypatch.setattr(unet, "UNetRace", lambda **given: small(**{**test_unet.SMALL, **given}))
    out = tmp_path / "race.json"
    done = CliRunner().invoke(bench, [name, "--rate", "200mbit", *more, "--json", str(out)])
    assert done.exception is None, done.output
    (race,) = json.loads(out.read_text())["races"]
    assert race["setup"]["rate"] == race["setup"]["asked_rate"] == "200mbit"
    if name == "pipeline":
        assert [row["system"] for row in race["rows"]] == [*test_pipeline.KINDS, "1f1b", "zb-v"]
    else:
        {"moe": test_moe, "unet": test_unet}[name].check(race)


# --- tables -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "table", "shown"),
    [
        ("pipeline-100mbit-4-hosts", pipeline_table, lambda row: f"{row['step_s']:.3f}"),
        ("tensor-1024", tensor_table, lambda row: f"{row['step_s']:.3f}"),
        ("moe-balanced", moe_table, lambda row: f"{1000 * row['step_s']:.0f}"),
        ("unet-balanced", unet_table, lambda row: f"{1000 * row['step_s']:.0f}"),
        ("reshard-200mbit", reshard_table, lambda row: f"{row['measured_s']:.3f}"),
        ("predict", predict_table, lambda row: f"{row['measured_ms']:.0f}"),
        ("compute-1-thread", compute_table, None),
        ("published", published_table, None),
    ],
)
def test_a_table_has_the_recorded_figures(
    file: str, table: Any, shown: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    document = recorded(file)
    for race in document.get("races", [document]):
        table(race).print()
        printed = capsys.readouterr().out
        assert printed
        assert [row for row in race.get("rows", ()) if shown and shown(row) not in printed] == []
