"""Run a function as several ranks on Gloo. PyTorch is imported once, and the ranks are forks of that process.

    world(4, "tests.tensor.test_face:trains")

A fresh process does the forking, for a process that has run a backward pass must not fork.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).parents[2]

TIMEOUT_S = 90.0
"""Longer than any of these takes on two busy cores."""


def world(
    ranks: int,
    function: str,
    *arguments: str,
    fails: bool = False,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run "module:function" with `arguments` on so many ranks; returns all that they printed.

    fails: every rank must end with an error, rather than none of them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = subprocess.run(
        [sys.executable, "-m", "tests.tensor.world", str(ranks), str(port), function, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    statuses = [int(word) for word in found.stdout.rsplit("statuses", 1)[-1].split()]
    assert len(statuses) == ranks, found.stdout
    wrong = [rank for rank, status in enumerate(statuses) if (status != 0) != fails]
    assert not wrong, f"ranks {wrong} ended with the wrong status, of {statuses}:\n{found.stdout}"
    return found.stdout


def _rank(rank: int, ranks: int, port: int, function: str, arguments: tuple[str, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, name = function.split(":")
    getattr(import_module(module), name)(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def _main(ranks: int, port: int, function: str, *arguments: str) -> None:
    import_module(function.split(":")[0])
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=_rank, args=(rank, ranks, port, function, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + TIMEOUT_S * 0.8
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    if late:
        print(f"ranks {late} did not end", flush=True)
    print("statuses", *(-99 if r in late else p.exitcode for r, p in enumerate(processes)), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
