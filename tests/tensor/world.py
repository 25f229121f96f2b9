"""Run functions as several ranks on Gloo. PyTorch is imported once, and the ranks are forks of that process.

    all_end_well([(4, "tests.tensor.test_face:four_ranks")])

A fresh process does the forking, for a process that has run a backward pass must not fork.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).parents[2]

TIMEOUT_S = 150.0
"""Longer than any of these takes on two busy cores."""

MARK = "world ended:"


@dataclass(frozen=True)
class Ended:
    """How a function ended: each rank's exit status (None: it was killed), what they printed, the time."""

    statuses: tuple[int | None, ...]
    output: str
    seconds: float


def all_end_well(functions: Sequence[tuple[int, str]], environment: Mapping[str, str] | None = None) -> None:
    """Run each "module:function" on so many ranks. Every rank must end well."""
    for (ranks, function), ended in zip(functions, worlds(functions, environment)):
        assert ended.statuses == (0,) * ranks, f"{function}: {ended.statuses}\n{ended.output}"


def worlds(functions: Sequence[tuple[int, str]], environment: Mapping[str, str] | None = None) -> list[Ended]:
    """Run one (ranks, "module:function") after the other, each on new ranks, however the ranks end."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.tensor.world", *(f"{name}@{ranks}" for ranks, name in functions)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S * len(functions) + 60,
    )
    ends: list[Ended] = []
    output: list[str] = []
    for line in found.stdout.splitlines():
        if line.startswith(MARK):
            seconds, *statuses = line.removeprefix(MARK).split()
            known = tuple(None if status == "killed" else int(status) for status in statuses)
            ends.append(Ended(known, "\n".join(output), float(seconds)))
            output = []
        else:
            output.append(line)
    assert len(ends) == len(functions), found.stdout
    return ends


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(rank: int, ranks: int, port: int, function: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that has ended while others still connect to it would leave them hanging
    module, name = function.split(":")
    getattr(import_module(module), name)()
    dist.destroy_process_group()


def _main(*functions: str) -> None:
    for function in functions:
        import_module(function.split(":")[0])
    # What sharding rules import when they are first asked: once here, and not in every rank.
    import_module("torch._dynamo")
    fork = multiprocessing.get_context("fork")
    for word in functions:
        function, _, count = word.partition("@")
        ranks = int(count)
        began = time.monotonic()
        port = _free_port()
        processes = [fork.Process(target=_rank, args=(rank, ranks, port, function)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, began + TIMEOUT_S - time.monotonic()))
        ended = time.monotonic() - began
        statuses = ["killed" if process.is_alive() else str(process.exitcode) for process in processes]
        for process in processes:
            process.kill()
            process.join()
        print(f"\n{MARK} {ended:.3f}", *statuses, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
