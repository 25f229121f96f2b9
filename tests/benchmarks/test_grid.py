"""The grid of planning: what it says of a job, that this repeats, and what counts as worse."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grid

CSV_JOB = "pp2 virtual stages, tied"


def one(**others: Any) -> dict[str, Any]:
    figures = {"step_us": 100.0, "exposed_us": 0.0, "peak_bytes": 10, "bound_us": 90.0, "planning_s": 1.0}
    return figures | others


def faults(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found: list[str] = grid.compare({"jobs": {"a": old}}, {"jobs": {"a": new}}, say=lambda line: None)
    return found


def test_it_has_36_jobs_of_all_kinds() -> None:
    assert len({job.name for job in grid.JOBS}) == 36
    families = {job.parallel["schedule"] for job in grid.JOBS}
    assert families >= {
        "gpipe",
        "1f1b",
        "eager-1f1b",
        "zb-h1",
        "zb-h2",
        "zb-v",
        "dualpipev",
        "auto",
        *grid.CSVS,
    }
    assert {job.kind for job in grid.JOBS} == {"gpt", "llama", "experts", "unet"}
    asked = {key for job in grid.JOBS for key in job.parallel}
    assert asked >= {"pp", "tp", "dp", "sequence_parallel", "recompute", "split_ops", "overlap", "max_live"}


@pytest.mark.slow
def test_a_file_of_figures_repeats_and_is_no_worse_than_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    for path in (old, new):
        assert grid.main(["--out", str(path), "--only", CSV_JOB]) == 0
    first, second = (json.loads(path.read_text())["jobs"] for path in (old, new))
    assert list(first) == [CSV_JOB]
    assert first[CSV_JOB].pop("planning_s") > 0
    assert second[CSV_JOB].pop("planning_s") > 0
    assert first == second
    assert 0 < first[CSV_JOB]["bound_us"] <= first[CSV_JOB]["step_us"]
    assert first[CSV_JOB]["exposed_us"] == pytest.approx(sum(first[CSV_JOB]["exposed_axis_us"].values()))
    capsys.readouterr()
    assert grid.main(["--compare", str(old), str(new)]) == 0
    assert "nothing is worse" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step_us": 101.01}, ["step"]),
        ({"bound_us": 90.0 - 1e-6}, ["bound"]),
        ({"planning_s": 1.21}, ["planning"]),
        ({"step_us": 100.29, "bound_us": 90.0 - 1e-9, "planning_s": 1.19}, []),
        ({"step_us": 80.0, "bound_us": 95.0, "exposed_us": 5.0, "peak_bytes": 11}, []),
    ],
)
def test_what_is_worse_is_named(change: dict[str, Any], words: list[str]) -> None:
    found = faults(one(), one(**change))
    assert bool(found) == bool(words)
    assert all(fault.startswith(("a: ", "all jobs: ")) and words[0] in fault for fault in found)


def test_a_short_planning_is_judged_with_the_others_only() -> None:
    short = {"jobs": {"a": one(planning_s=0.1), "b": one(planning_s=5.0)}}
    longer = copy.deepcopy(short)
    longer["jobs"]["a"]["planning_s"] = 0.35
    assert grid.compare(short, longer, say=lambda line: None) == []
    longer["jobs"]["a"]["planning_s"] = 0.37
    assert [fault[:2] for fault in grid.compare(short, longer, say=lambda line: None)] == ["a:"]
    many = {"jobs": {str(n): one(planning_s=0.1) for n in range(9)}}
    slower = {"jobs": {str(n): one(planning_s=0.2) for n in range(9)}}
    assert grid.compare(many, slower, say=lambda line: None) == [
        "all jobs: planning takes 2.00 times as long"
    ]


def test_worse_or_missing_jobs_end_with_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = tmp_path / "old.json", tmp_path / "new.json"
    paths[0].write_text(json.dumps({"jobs": {"a": one(), "b": one()}}))
    paths[1].write_text(json.dumps({"jobs": {"a": one(step_us=110.0), "c": one()}}))
    assert grid.main(["--compare", *map(str, paths)]) == 1
    said = capsys.readouterr().out
    assert "a: its step takes 1.1000 times as long" in said
    assert "b: is in one of the files only" in said
    assert "c: is in one of the files only" in said
