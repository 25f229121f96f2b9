"""A race's workers in small, as processes of this machine and not of a lab."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.in_lab import worker_command


def run_small(module: str, setup: Mapping[str, Any], world: int, out: Path, *words: str) -> Any:
    """What rank 0 gives. setup: of the module's `Setup`."""
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
