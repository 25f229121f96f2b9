"""Processes of tests as forks of one that has imported PyTorch and Stretto, so that imports are paid once.

    ended = run_forks([Fork("tests.runtime.test_lanes", ("creation", str(folder)), {"RANK": "0"}, output)])

1. The first call starts a server, `python -m tests.forks`, which imports what nearly all ranks need. It
   computes nothing: a process that has run a backward pass, and has threads, must not fork.
2. For each call the server forks a process that imports what these programs share, and forks each of them.
3. The server shows how they ended; with its input, at the end of the tests, it ends itself.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]

# From the fifth on: what sharding rules import when they are first asked, the language of the tests, and what
# runs import.
SHARED = (
    "torch",
    "stretto.capturing",
    "stretto.planning.make_plan",
    "stretto.runtime",
    "torch._dynamo",
    "pytest",
    "stretto.cli.main",
    "stretto.train.trainer",
)

_server: list[subprocess.Popen[str]] = []


@dataclass(frozen=True)
class Fork:
    """A module by name, as `python -m` runs it, a file that ends in .py, or a "module:function" to call.

    `environment` is added to that of the tests. What it prints is added to the file `output`, its errors too
    where no file is named for them.
    """

    program: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    output: str
    errors: str = ""


@dataclass(frozen=True)
class Ended:
    """Exit statuses as `subprocess` gives them (None: did not end in time, and was killed); the time."""

    statuses: tuple[int | None, ...]
    seconds: float


def run_forks(forks: Sequence[Fork], timeout_s: float, shared: Sequence[str] = ()) -> Ended:
    """Run all of them side by side to their ends. shared: modules that they all import."""
    if not _server:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.forks"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _server.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipes))
    (server,) = _server
    assert server.stdin is not None
    assert server.stdout is not None
    asked = {"forks": [asdict(fork) for fork in forks], "timeout_s": timeout_s, "shared": list(shared)}
    # As it is now, and not as it was when the server began.
    print(json.dumps(asked | {"environment": dict(os.environ)}), file=server.stdin, flush=True)
    told = server.stdout.readline()
    assert told, "the server of forks has failed; what it said is above"
    answer = json.loads(told)
    return Ended(tuple(answer["statuses"]), answer["seconds"])


def end_server() -> None:
    """At the end of the tests."""
    while _server:
        _server.pop().communicate()


def _fork(program: str, arguments: list[str], environment: dict[str, str], output: str, errors: str) -> None:
    """What a rank does."""
    for stream, file in ((1, output), (2, errors or output)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    if ":" in program:
        module, function = program.split(":")
        getattr(import_module(module), function)(*arguments)
        return
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _world(asked: dict[str, Any]) -> None:
    """Fork all, wait for them, tell how they ended."""
    for module in asked["shared"]:
        import_module(module)
    base = {**asked["environment"], "OMP_NUM_THREADS": "1"}
    began_s = time.monotonic()
    processes = []
    for fork in asked["forks"]:
        named = (
            fork["program"],
            fork["arguments"],
            base | fork["environment"],
            fork["output"],
            fork["errors"],
        )
        processes.append(multiprocessing.get_context("fork").Process(target=_fork, args=named))
        processes[-1].start()
    for process in processes:
        process.join(max(0.0, began_s + asked["timeout_s"] - time.monotonic()))
    seconds = time.monotonic() - began_s
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    print(json.dumps({"statuses": statuses, "seconds": seconds}), flush=True)


def _serve() -> None:
    for module in SHARED:
        import_module(module)
    gc.collect()
    gc.freeze()  # no fork need look through what they share
    for line in sys.stdin:
        world = multiprocessing.get_context("fork").Process(target=_world, args=(json.loads(line),))
        world.start()
        world.join()


if __name__ == "__main__":
    _serve()
