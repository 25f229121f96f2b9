"""Start a program on several processes, as `torchrun` does; show what it said if it fails."""

from __future__ import annotations

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.forks import REPOSITORY, Fork, run_forks

__all__ = ["REPOSITORY", "launch"]

TIMEOUT_S = 240.0
"""Longer than any launch of these tests takes on two busy cores."""


def launch(
    ranks: int,
    program: str | Path,
    *arguments: str,
    statuses: tuple[int, ...] = (0,),
    within_s: float = TIMEOUT_S,
) -> list[str]:
    """Run a program, a module by name or a file, as `ranks` processes; returns what each printed.

    All processes are gone when it returns. Fails unless every exit status is among `statuses`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(ranks)]
        forks = [
            Fork(str(program), arguments, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, str(file))
            for rank, file in enumerate(files)
        ]
        ended = run_forks(forks, within_s)
        outputs = [file.read_text() for file in files]
    for rank, status in enumerate(ended.statuses):
        assert status in statuses, f"rank {rank} ended with {status}:\n{outputs[rank]}"
    return outputs
