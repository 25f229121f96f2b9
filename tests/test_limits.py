"""Numbers of files and options are bounded before anything is made of them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.config import load_settings
from stretto.errors import StrettoError, UsageError
from stretto.ir.serialize import load_plan
from stretto.price.cluster import describe
from stretto.schedule.csv import from_csv
from tests.clusters import cores
from tests.synthetic import make_job

HUGE = 10**9
COMMANDS = {
    "a mesh": (
        f"reshard --shape 8 --src {HUGE}x1:R --dst 1x1:R",
        "boxes are all listed; give a mesh of fewer",
    ),
    "digits of a mesh": (f"reshard --shape 8 --src {'9' * 5000}x1:R --dst 1x1:R", "is no mesh and layout"),
    "a size": (f"reshard --shape {'9' * 30} --src 1x1:R --dst 1x1:R", "product has 63 bits at most"),
    "a size below 0": ("reshard --shape=-4 --src 1x1:R --dst 1x1:R", "give sizes from 0"),
    "a rate": (f"reshard --shape 4 --src 1x1:R --dst 1x1:R --rate {'9' * 400}gbit", "expected a number and"),
    "ranks": (f"schedule --family 1f1b --ranks {HUGE} --microbatches 2", "give fewer of one of them"),
    "stages": (f"schedule --family 1f1b --stages {HUGE} --microbatches 2", "give fewer of one of them"),
    "devices": (f"cluster show h100x{HUGE}", "more than 1,048,576 devices; give fewer"),
}


def refused_by(line: str) -> str:
    tracemalloc.start()
    try:
        error = CliRunner().invoke(app, line.split()).exception
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert isinstance(error, UsageError), repr(error)
    return str(error)


@pytest.mark.parametrize("what", COMMANDS)
def test_options(what: str) -> None:
    line, told = COMMANDS[what]
    assert told in refused_by(line)


def test_a_schedule(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'0F1000000000' is beyond 1,048,576 microbatches; number"):
        from_csv(f"0F0,0B0,0F{HUGE}\n")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        *((f"parallel.{axis}={HUGE}", r"less than or equal to 1048576") for axis in ("pp", "dp", "tp", "ep")),
        ("parallel.microbatches=1073741824", "less than or equal to 1048576"),
        ("parallel.virtual_stages=999999999", "or input should be less than or equal to 65536"),
        ("model.layers=1000000", "less than or equal to 4096"),
        ("model.hidden=999999999", "less than or equal to 1048576"),
    ],
)
def test_settings(tmp_path: Path, setting: str, told: str) -> None:
    (tmp_path / "a.toml").write_text("")
    with pytest.raises(UsageError, match=told):
        load_settings(tmp_path / "a.toml", [setting])


def test_products_of_settings() -> None:
    with pytest.raises(UsageError, match="is the number of ranks: 1,099,511,627,776 are more than 1,048,576"):
        stretto.Parallel(dp=2**20, tp=2**20)
    with pytest.raises(
        UsageError, match="is what a schedule orders: 4,194,304 are more than 1,048,576; give"
    ):
        stretto.Parallel(pp=2**11, microbatches=2**11)
    assert stretto.Parallel(pp=64, dp=128, tp=128, microbatches=2**14).world == 2**20


def test_a_model_of_transformers(tmp_path: Path) -> None:
    head = '[model]\nkind = "huggingface"\narchitecture = "LlamaForCausalLM"\n[model.config]\n'
    for line, told in (
        ("num_hidden_layers = 100000000", "num_hidden_layers = 100000000 is more than 4,096"),
        ('attn_implementation = "a/kernel"', "is a program of the Hub: give 'sdpa' or 'eager'"),
    ):
        (tmp_path / "a.toml").write_text(head + line)
        with pytest.raises(UsageError, match=told):
            load_settings(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"axes": [["dp", HUGE]]}, "2000000000 ranks; at most 1,048,576 are planned for"),
        ({"microbatches": HUGE}, "1000000000; from 1 to 1,048,576 are possible"),
        ({"microbatches": 0}, "0; from 1 to 1,048,576 are possible"),
    ],
)
def test_a_plan(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "plan.json"
    stretto.plan(make_job(2, 2), cores()).save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "job": {**data["job"], **change}}))
    with pytest.raises(UsageError, match=told):
        load_plan(path)


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for key in ("count", "node_devices"):
        given = {"count": 8, key: HUGE}
        path.write_text('device = "h100"\n' + "".join(f"{name} = {one}\n" for name, one in given.items()))
        with pytest.raises(StrettoError, match=f"{key} = 1000000000.*less than or equal to 1048576"):
            describe(str(path))
