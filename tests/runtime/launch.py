"""Start a program on several processes, as `torchrun` does; show what it said if it fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

TIMEOUT_S = 240.0
"""Longer than any launch of these tests takes on two busy cores."""


def launch(ranks: int, program: str | Path, *arguments: str, statuses: tuple[int, ...] = (0,)) -> list[str]:
    """Run a program, a module by name or a file, as `ranks` processes; returns what each printed.

    All processes are gone when it returns. Fails unless every exit status is among `statuses`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = [str(program)] if isinstance(program, Path) else ["-m", program]
    processes = []
    for rank in range(ranks):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *named, *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        assert process.returncode in statuses, (
            f"rank {rank} ended with {process.returncode}:\n{outputs[rank]}"
        )
    return outputs
