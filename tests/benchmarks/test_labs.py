"""Races in labs: what a worker takes and what is read back, the balanced rate, what is kept and printed."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.commands import bench
from benchmarks.labs import CORES, balanced_rate, result_of, run_races
from benchmarks.tables import (
    compute_table,
    moe_table,
    pipeline_table,
    predict_table,
    published_table,
    reshard_table,
    tensor_table,
    unet_table,
    warn_of_noise,
)
from benchmarks.tensor import WORKER, TensorRace, races
from benchmarks.work import RankWork, work_of
from typer.testing import CliRunner

from benchmarks import labs
from stretto.errors import RunError
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.program import Job
from stretto.lab import Lab, Statuses
from tests.synthetic_comm import make_comm_job

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def recorded(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


class FakeLab(Lab):
    """A lab of two hosts of two ranks that makes nothing; its worker writes back what it takes."""

    def __init__(self, failed: int | None) -> None:
        super().__init__(hosts=2, ranks_per_host=2)
        self.failed = failed
        self.entered: list[bool] = []

    def __enter__(self) -> Lab:
        self.entered.append(True)
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.append(False)

    def run(self, command: Any, env: Any = None, **options: Any) -> Statuses:  # type: ignore[override]
        assert self.entered == [True]
        assert options == {"quiet_others": True}
        statuses = Statuses([0, 0, 0, 0])
        if self.failed is not None:
            statuses.first_failed, statuses[self.failed] = self.failed, 1
        taken = {"command": command[:4], "setup": json.loads(command[4]), "words": command[6:], "env": env}
        Path(command[5]).write_text(json.dumps(taken))
        return statuses


def test_the_worker_takes_its_setup_and_its_result_is_read() -> None:
    lab = FakeLab(None)
    assert result_of(lab, "some", {"threads_per_rank": 3, "rate": "1gbit"}, "probe") == {
        "command": [sys.executable, "-m", "benchmarks.labs", "some"],
        "setup": {"threads_per_rank": 3, "rate": "1gbit"},
        "words": ["probe"],
        "env": {"OMP_NUM_THREADS": "3", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    }
    assert lab.entered == [True, False]


def test_a_rank_that_fails_is_named_and_the_lab_is_gone() -> None:
    lab = FakeLab(3)
    with pytest.raises(RunError, match="the small race failed on host 1 rank 3; its output is above"):
        result_of(lab, "some", {"threads_per_rank": 1}, what="the small race")
    assert lab.entered == [True, False]


# --- races in labs ------------------------------------------------------------------------------------


def work(compute_us: float, wire_bytes: float, message_bytes: float = 0.0, collective_us: float = 1e4) -> Any:
    return asdict(RankWork(compute_us, collective_us, wire_bytes, message_bytes))


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        ([work(8e5, 3.14159e7)], "310mbit"),
        ([work(8e7, 3.14159e7)], "3.1mbit"),
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


def test_the_table_names_what_was_taken_instead_and_who_beats_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (race, *_) = recorded("tensor-1024")["races"]
    row = {**race["rows"][-1], "system": "window", "overlap": "off", "rounds_s": [2.0, 2.0, 2.5]}
    tensor_table({**race, "rows": [row, {**row, "ratio_to_bound": 1.5 / 1.6}]}).print()
    warn_of_noise([row])
    printed = capsys.readouterr()
    assert "window (as off)" in printed.out
    assert " ".join(printed.out.split()).count("below it, as its costs are too high: window") == 1
    assert "The rounds of window spread by more than 15 %" in printed.err


# --- what a microbatch asks of a pipeline rank -----------------------------------------------------------


def costs_of(job: Job, op_us: float, collective_us: float) -> Costs:
    """Every op that is no wait and no start takes `op_us`, every collective `collective_us`."""
    times = {
        (stage.index, op.name): 0.0 if op.target.startswith("comm.") else op_us
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }
    cost = CollectiveCost(Curve(((0.0, collective_us), (1e9, collective_us))))
    return Costs(
        times, {}, Link(0.0, 1.0), 0.0, "by hand", {("tp", k): cost for k in ("all_reduce", "all_gather")}
    )


def test_the_work_of_a_microbatch() -> None:
    job = make_comm_job(1, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0)
    (stage,) = job.stages
    starts = [op.collective for ops in stage.ops.values() for op in ops if op.collective is not None]
    moved = sum(asked.nbytes for asked in starts)
    plain = sum(not op.target.startswith("comm.") for ops in stage.ops.values() for op in ops)
    work = work_of(job, costs, [0])
    assert len(starts) == 4
    assert work.compute_us == 10.0 * plain
    assert work.collective_us == 160.0
    assert work.wire_bytes == moved  # two ranks: half there, half back
    assert work.message_bytes == 0.0, "no other rank"


def test_messages_leave_for_other_ranks_only() -> None:
    job = make_comm_job(3, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0)
    there, back = ([e for e in job.edges if e.source == 1 and e.target == target] for target in (2, 0))
    assert there
    assert back
    nbytes = {edge: edge.spec.nbytes for edge in job.edges}
    assert work_of(job, costs, [1]).message_bytes == sum(nbytes[edge] for edge in (*there, *back))
    assert work_of(job, costs, [1, 2]).message_bytes == sum(nbytes[edge] for edge in back)
