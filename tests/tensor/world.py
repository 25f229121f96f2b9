"""Run functions as several ranks on Gloo. PyTorch is imported once, and the ranks are forks of that process.

all_end_well([(4, "tests.tensor.test_face:four_ranks")])
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from tests.forks import Fork, run_forks

TIMEOUT_S = 150.0
"""Longer than any of these takes on two busy cores."""


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
    return [_world(ranks, function, environment or {}) for ranks, function in functions]


def _world(ranks: int, function: str, environment: Mapping[str, str]) -> Ended:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    with TemporaryDirectory() as folder:
        output = Path(folder) / "all"
        forks = [
            Fork("tests.tensor.world:rank", (function,), {**world, "RANK": str(rank)}, str(output))
            for rank in range(ranks)
        ]
        ended = run_forks(forks, TIMEOUT_S, shared=(function.split(":")[0],))
        return Ended(ended.statuses, output.read_text(), ended.seconds)


def rank(function: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that has ended while others still connect to it would leave them hanging
    module, name = function.split(":")
    getattr(import_module(module), name)()
    dist.destroy_process_group()
