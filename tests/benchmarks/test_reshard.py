"""The reshard race in small: cases and what is predicted of them, values that are checked, and refusals."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.commands import bench
from benchmarks.in_lab import worker_command
from benchmarks.reshard import Setup
from benchmarks.reshard_cases import COLUMNS, HOSTS, ITEMSIZE_BYTES, RANKS_PER_HOST, cases, planned
from benchmarks.tables import reshard_table
from typer.testing import CliRunner

from stretto.errors import UsageError

ROWS = 4096
BYTES_PER_S = 25e6
UNIT_S = ROWS * COLUMNS * ITEMSIZE_BYTES / BYTES_PER_S


def predicted_units() -> dict[str, float]:
    return {
        case.name: sum(one.plan.makespan_us for one in planned(case, ROWS, BYTES_PER_S)) / 1e6 / UNIT_S
        for case in cases()
    }


def test_what_is_predicted_of_each_case() -> None:
    """A chain takes a piece of 1 MiB, a 64th of the tensor, longer for each host; a copy to each rank takes a
    unit, be it on a host of its own or not."""
    piece = 1 / 64
    assert predicted_units() == pytest.approx(
        {
            "one host to 1, broadcast, balanced": 1.0,
            "one host to 2, broadcast, balanced": 1.0 + piece,
            "one host to 2, point_to_point, balanced": 2.0,
            "one host to 3, broadcast, balanced": 1.0 + 2 * piece,
            "one host to 3, point_to_point, balanced": 3.0,
            "one rank to 1 x 2, broadcast, balanced": 1.0,
            "one rank to 1 x 2, point_to_point, balanced": 2.0,
            "one rank to 2 x 2, broadcast, balanced": 1.0 + piece,
            "one rank to 2 x 2, point_to_point, balanced": 4.0,
            "one rank to 3 x 2, broadcast, balanced": 1.0 + 2 * piece,
            "one rank to 3 x 2, point_to_point, balanced": 6.0,
            "two replicas to rows, broadcast, naive": 1.0,
            "two replicas to rows, broadcast, balanced": 0.5,
            "columns to rows, broadcast, naive": 0.75,
            "columns to rows, broadcast, balanced": 0.5,
            "whole to 2 meshes in turn, broadcast, balanced": 2.0,
            "whole to 2 meshes together, broadcast, balanced": 1.0 + piece,
            "rows to 2 meshes in turn, broadcast, balanced": 2.0,
            "rows to 2 meshes together, broadcast, balanced": 1.0,
        }
    )


@pytest.mark.slow
def test_a_small_race_checks_values_and_says_what_the_page_says(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "race.json"
    setup = asdict(Setup(mib=1, rounds=3))
    command = worker_command("reshard", setup, out)
    world = HOSTS * RANKS_PER_HOST
    base = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command, env={**base, "RANK": str(r), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
        )
        for r in range(world)
    ]
    errors = [rank.communicate(timeout=200)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, errors
    result = json.loads(out.read_text())
    assert [f"{row['case']}, {row['mode']}, {row['choice']}" for row in result["rows"]] == list(
        predicted_units()
    )
    for row in result["rows"]:
        assert len(row["rounds_s"]) == 3
        assert row["measured_s"] == sorted(row["rounds_s"])[1]
        assert row["measured_over_predicted"] == pytest.approx(row["measured_s"] / row["predicted_s"])
        assert row["predicted_s"] >= row["bound_s"] * (1 - 1e-9)


def test_the_table_names_each_case_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "case": "one host to 3",
        "mode": "point_to_point",
        "choice": "balanced",
        "bound_s": 1.0,
        "predicted_s": 3.0,
        "measured_s": 4.0,
        "measured_over_predicted": 4.0 / 3.0,
        "ratio_to_bound": 4.0,
    }
    reshard_table({"setup": asdict(Setup()), "rows": [row]}).print()
    printed = capsys.readouterr().out
    for word in ("64 MiB at 200mbit", "one host to 3", "point to point", "+33.3%", "4.00"):
        assert word in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rounds", "2"), "3 rounds or more"),
        (("--rate", "unlimited"), "give a rate such as 200mbit"),
        (("--cases", "fan-in"), "choose of fan-out, devices, layouts, meshes"),
        (("--json", "/nowhere/at/all.json"), "does not exist"),
    ],
)
def test_wrong_usage_is_refused_before_the_lab_is_up(arguments: tuple[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(bench, ["reshard", *arguments], catch_exceptions=False)
