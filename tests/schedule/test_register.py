"""Families of your own, and schedules given as they are: in plans, settings, "auto" and tunings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.capturing.zoo import Chain, mean_square, rows
from tests.clusters import cores

import stretto
from stretto import schedule
from stretto.config import load_settings
from stretto.errors import UsageError
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.ir.stage_maps import STAGE_MAPS
from stretto.schedule import FAMILIES, Schedule, ScheduleShape, StageMap, make_schedule
from stretto.schedule.csv import from_csv, to_csv
from stretto.tune.choices import read_fixed

CLUSTER = cores()


def eager(wanted: ScheduleShape) -> Schedule:
    """Stretto's own, so that what it is worth is known."""
    return make_schedule("eager-1f1b", wanted.ranks, wanted.microbatches, max_live=wanted.max_live)


@pytest.fixture
def mine() -> Iterator[str]:
    schedule.register("mine", eager)
    yield "mine"
    FAMILIES.pop("mine")
    STAGE_MAPS.pop("mine")


def test_it_is_planned_by_its_name(mine: str) -> None:
    job = stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(pp=2, microbatches=4, schedule=mine))
    plan = stretto.plan(job, CLUSTER)
    assert plan.schedule == replace(make_schedule("eager-1f1b", 2, 4), family="mine")
    assert plan_from_text(plan_to_text(plan), "plan") == plan
    assert stretto.plan(job, CLUSTER, schedule="1f1b").schedule.family == "1f1b"


def test_it_is_known_wherever_names_are(mine: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    assert load_settings(path, ["parallel.schedule=mine"]).parallel.schedule == "mine"
    assert read_fixed(["schedule=mine"]) == {"schedule": "mine"}
    with pytest.raises(UsageError, match="did you mean 'mine'"):
        load_settings(path, ["parallel.schedule=minee"])


def test_of_several_stages_a_rank() -> None:
    schedule.register(
        "v2", lambda w: make_schedule("zb-v", w.ranks, w.microbatches), places=StageMap("v", 2, 2, 2)
    )
    try:
        assert make_schedule("v2", 2, 4).stage_ranks == (0, 1, 1, 0)
        with pytest.raises(UsageError, match="'v2' has 2 stages a rank, not virtual_stages = 3"):
            make_schedule("v2", 2, 4, virtual_stages=3)
    finally:
        FAMILIES.pop("v2")
        STAGE_MAPS.pop("v2")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda wanted: 1 / 0, "it fails with ZeroDivisionError"),
        (lambda wanted: [], r"it gives \[\]; give a stretto.schedule.Schedule"),
        (lambda wanted: make_schedule("1f1b", 3, 4), "its schedule has ranks = 3, and 2 is wanted"),
        (lambda wanted: make_schedule("1f1b", 2, 3), "its schedule has microbatches = 3, and 4 is wanted"),
        (
            lambda wanted: from_csv("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F3,1B3,1B2,1F2\n"),
            "cannot progress",
        ),
    ],
)
def test_what_it_makes_is_looked_at(build: Any, message: str) -> None:
    schedule.register("odd", build)
    try:
        with pytest.raises(UsageError, match=f"schedule family 'odd', .*{message}|{message}"):
            make_schedule("odd", 2, 4)
    finally:
        FAMILIES.pop("odd")
        STAGE_MAPS.pop("odd")


@pytest.mark.parametrize(
    ("name", "build", "message"),
    [
        ("1f1b", eager, "Stretto has a schedule family '1f1b'"),
        ("auto", eager, "'auto' is no name"),
        ("mine.csv", eager, "'mine.csv' is no name"),
        ("", eager, "'' is no name"),
        ("mine", 3, "which cannot be called"),
    ],
)
def test_what_cannot_be_registered(name: str, build: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule.register(name, build)
    assert "mine" not in FAMILIES


def test_a_schedule_is_taken_as_it_is(tmp_path: Path) -> None:
    own = replace(make_schedule("eager-1f1b", 2, 4), family="by hand")
    job = stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(pp=2, microbatches=4, schedule=own))
    plan = stretto.plan(job, CLUSTER)
    assert plan.schedule == own
    assert plan_from_text(plan_to_text(plan), "plan") == plan
    (tmp_path / "own.csv").write_text(to_csv(own))
    by_file = stretto.Parallel(pp=2, microbatches=4, schedule=str(tmp_path / "own.csv"))
    other = stretto.plan(stretto.capture(Chain(), rows(), mean_square, by_file), CLUSTER)
    assert other.schedule.orders == own.orders
    assert other.prediction == plan.prediction


UNEVEN = "0F0,2F0,2B0,0B0\n1F0,1B0\n"
"""Three stages on two ranks."""


def test_ranks_may_have_unequally_many_stages(tmp_path: Path) -> None:
    own = from_csv(UNEVEN)
    job = stretto.capture(Chain(), rows(), mean_square, stretto.Parallel(pp=2, schedule=own))
    assert len(job.stages) == 3
    assert stretto.plan(job, CLUSTER).schedule.stage_ranks == (0, 1, 0)
    (tmp_path / "uneven.csv").write_text(UNEVEN)
    path = tmp_path / "run.toml"
    path.touch()
    changes = ["parallel.pp=2", "parallel.stages=3", f"parallel.schedule={tmp_path}/uneven.csv"]
    parallel = load_settings(path, changes).parallel
    assert parallel.stages_asked == 3
    assert len(stretto.capture(Chain(), rows(), mean_square, parallel).stages) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": make_schedule("1f1b", 2, 4)}, "the schedule '1f1b' is for pp = 2, not 1: give pp = 2"),
        ({"schedule": make_schedule("1f1b", 2, 4), "pp": 2}, "is for microbatches = 4, not 1"),
        (
            {"schedule": make_schedule("1f1b", 2, 4), "pp": 2, "microbatches": 4, "stages": 4},
            "stages = 4 makes 4 stages, but the schedule '1f1b' has 2 stages",
        ),
        (
            {"stages": 3, "pp": 2},
            "stages = 3 makes 3 stages, which must be a multiple of pp = 2: make",
        ),
        (
            {"stages": 4, "pp": 2, "virtual_stages": 1},
            "stages = 4 makes 4 stages, but pp = 2 and virtual_stages = 1 make 2; give virtual_stages = 2",
        ),
        (
            {"stages": 2, "split": ["a", "b"]},
            "stages = 2 makes 2 stages, but split names 2 modules and so",
        ),
        (
            {"schedule": 3},
            "schedule = 3: input should be a valid string, or",
        ),
        ({"schedule": ""}, "schedule = '': string should have at least 1 character"),
    ],
)
def test_what_does_not_fit_is_told_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        stretto.Parallel(**given)
