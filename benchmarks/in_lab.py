"""A race's workers in a lab: `run_worker` of a module on every rank; what rank 0's gives is read back.

Needs root, as every lab does. Touches the lab and a folder for the time of the run.

    1. The lab is made, and removed however the workers end: done, failed, or stopped from outside.
    2. A worker is this module as a program. Rank 0's lines are shown as they come, those of another
       rank only if it fails, in which case the race ends with an error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.race import running
from stretto.errors import RunError
from stretto.lab import Lab

CORES = 2
"""Cores that the hosts of a race share, whatever the machine has, so that figures of machines compare."""


def lab_of(world: int, rate: str) -> Lab:
    """The lab of a race with a rank on each host.

    As many hosts as cores have a core each; more have equal parts of them, by quota. All stay on their core
    (the tensor-parallel peers of a place on different ones, so that both meet the same neighbours): measured
    with four hosts of half a core, a small collective cost 1 ms instead of 2, where hosts that moved about
    waited for each other. Without quotas neighbours on a core take turns of 4 ms, for which whatever crosses
    the network waits: of 14 cells of `benchmarks.predict` so measured, three were 10 to 12 % from their
    predictions.
    """
    return Lab(world, rate, CORES / world if world > CORES else None, pin=True)


def result_of(lab: Lab, module: str, setup: Mapping[str, Any], *words: str, what: str = "the race") -> Any:
    """What `run_worker(Setup(**setup), *words)` of a module of `benchmarks` gives on rank 0.

    lab: one that is not up yet; what: what runs, as the error names it. Raises RunError when a rank fails,
    StrettoError when the machine cannot run a lab.
    """
    # Else PyTorch warns on every rank that it cannot look up names of hosts, and in a lab nobody can.
    environment = {"OMP_NUM_THREADS": str(setup["threads_per_rank"]), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        with lab:
            statuses = lab.run(worker_command(module, setup, out, *words), environment, quiet_others=True)
        if statuses.exit_status:
            assert statuses.first_failed is not None, "nothing but a failure ends this run early"
            raise RunError(f"{what} failed on {lab.name_of(statuses.first_failed)}; its output is above")
        return json.loads(out.read_text())


def worker_command(module: str, setup: Mapping[str, Any], out: Path, *words: str) -> list[str]:
    """What each rank runs."""
    return [sys.executable, "-m", "benchmarks.in_lab", module, json.dumps(setup), str(out), *words]


def main(module: str, setup: str, out: str, *words: str) -> None:
    """The worker's entry. Every `Setup` has `world` and `threads_per_rank`."""
    worker = import_module(f"benchmarks.{module}")
    made = worker.Setup(**json.loads(setup))
    with running(made.world, made.threads_per_rank) as first:
        result = worker.run_worker(made, *words)
        if first:
            Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
