"""A bench's worker in a lab: the module is run once for each rank, and what rank 0 wrote is read back.

Needs root, as every lab does. Touches the lab and a folder for the time of the run.

    1. The lab is made, and removed however the worker ends: done, failed, or stopped from outside.
    2. The worker is `python -m MODULE ARGUMENTS`. Rank 0's lines are shown as they come, those of another
       rank only if it fails, in which case the bench ends with an error.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import RunError
from stretto.lab import Lab

CORES = 2
"""Cores that the hosts of a bench share, whatever the machine has, so that figures of machines compare."""


def lab_of(world: int, rate: str) -> Lab:
    """The lab of a bench with a rank on each host.

    As many hosts as cores have a core each; more have equal parts of them, by quota. All stay on their core
    (the tensor-parallel peers of a place on different ones, so that both meet the same neighbours): measured
    with four hosts of half a core, a small collective cost 1 ms instead of 2, where hosts that moved about
    waited for each other. Without quotas neighbours on a core take turns of 4 ms, for which whatever crosses
    the network waits: of 14 cells of `bench.predict` so measured, three were 10 to 12 % from their
    predictions.
    """
    return Lab(world, rate, CORES / world if world > CORES else None, pin=True)


def run_worker(lab: Lab, module: str, arguments: Sequence[str], threads_per_rank: int, what: str) -> None:
    """Run a module's program on all ranks of a lab that is not up yet, and wait until all have ended.

    what: what runs, as the error names it. Raises RunError when a rank fails, StrettoError when the machine
    cannot run a lab.
    """
    # Else PyTorch warns on every rank that it cannot look up names of hosts, and in a lab nobody can.
    environment = {"OMP_NUM_THREADS": str(threads_per_rank), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with lab:
        statuses = lab.run([sys.executable, "-m", module, *arguments], environment, quiet_others=True)
    if statuses.exit_status:
        assert statuses.first_failed is not None, "nothing but a failure ends this run early"
        raise RunError(f"{what} failed on {lab.name_of(statuses.first_failed)}; its output is above")


def result_of(lab: Lab, module: str, setup: Mapping[str, Any], *words: str, what: str = "the race") -> Any:
    """What rank 0 of a module's program wrote: its arguments are the setup as JSON, the file, and `words`.

    setup: has "threads_per_rank", the threads of each rank's ops. Raises what `run_worker` raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_worker(lab, module, [json.dumps(setup), str(out), *words], setup["threads_per_rank"], what)
        return json.loads(out.read_text())
