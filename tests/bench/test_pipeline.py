"""The pipeline race in small: every system runs, gradients agree, and the JSON is what the docs promise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from stretto.bench.in_lab import worker_command
from stretto.bench.pipeline import FAMILIES
from stretto.bench.race import race
from stretto.cli.bench import bench
from stretto.errors import UsageError

SMALL = {
    "rate": "unlimited",
    "hidden": 32,
    "heads": 2,
    "layers_per_stage": 1,
    "sequence": 8,
    "microbatches": 4,
    "rounds": 5,
}


@pytest.mark.slow
def test_small_race_runs_every_system(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "race.json"
    command = worker_command("pipeline", SMALL, out)
    base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command, env={**base, "RANK": str(r), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
        )
        for r in range(2)
    ]
    errors = [rank.communicate(timeout=290)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    result = json.loads(out.read_text())
    rows = {row["system"]: row for row in result["rows"]}
    assert {"torch gpipe", "torch 1f1b", "torch zero bubble", *FAMILIES} == set(rows)
    assert rows["torch 1f1b"]["speedup_vs_torch_1f1b"] == 1.0
    for name, row in rows.items():
        assert len(row["rounds_s"]) == 5
        assert row["step_s"] == sorted(row["rounds_s"])[2]
        assert row["ratio_to_bound"] == pytest.approx(row["step_s"] / result["setup"]["bound_s"])
        if name in FAMILIES:
            assert row["predicted_s"] >= result["setup"]["bound_s"] * (1 - 1e-9)
            assert 0 <= row["exposed_s"] <= row["step_s"]
        else:
            assert row["predicted_s"] is None


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
    ("arguments", "message"),
    [
        (["pipeline", "--rounds", "2"], "--rounds 2: a median on a noisy machine wants 5 rounds"),
        (["pipeline", "--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_setup_is_the_documented_work() -> None:
    from stretto.bench.pipeline import Blocks, Setup

    setup = Setup()
    blocks = Blocks(setup)
    assert len(blocks) == 8
    assert setup.rate == "100mbit"
    x = torch.randn(1, setup.sequence, setup.hidden)
    assert blocks(x).shape == x.shape
    assert x.nbytes == 512 * 1024
