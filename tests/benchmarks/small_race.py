"""A race's workers in small, as processes of this machine and not of a lab."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.labs import worker_command


def run_small(module: str, setup: Mapping[str, Any], world: int, out: Path, *words: str) -> Any:
    """What rank 0 gives. setup: of the module's `SETUP`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = worker_command(module, setup, out, *words)
    base = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            command, env={**base, "RANK": str(r), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
        )
        for r in range(world)
    ]
    errors = [rank.communicate(timeout=290)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, errors
    return json.loads(out.read_text())


def checked_rows(
    result: Any, systems: Sequence[str], bases: Mapping[str, str], error: float = 1e-5
) -> dict[str, dict[str, Any]]:
    """The rows of a race by system, of which all are what a race promises. bases: the word for a system that
    others are compared with -> the system."""
    rows = {row["system"]: row for row in result["rows"]}
    assert list(rows) == list(systems)
    setup = result["setup"]
    assert 0 < setup["worst_error_vs_plain"] < error
    for row in rows.values():
        assert row["step_s"] == sorted(row["rounds_s"])[len(row["rounds_s"]) // 2]
        assert row["ratio_to_bound"] == row["step_s"] / setup["bound_s"]
        for word, base in bases.items():
            assert row[f"speedup_vs_{word}"] == rows[base]["step_s"] / row["step_s"]
        exposed_s = row.get("exposed_s", [])
        for rank_s in exposed_s if isinstance(exposed_s, list) else [exposed_s]:
            assert 0 <= rank_s <= row["step_s"]
    return rows
