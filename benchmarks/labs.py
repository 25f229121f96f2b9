"""Races in labs: workers of a module on every rank of an emulated cluster, one lab after the other.

Needs root, as every lab does.

    1. The lab is made, and removed however the workers end: done, failed, or stopped from outside.
    2. A worker is this module as a program. Rank 0's lines are shown as they come, those of another rank only
       if it fails, in which case the race ends with an error. What rank 0's `run_worker` gives is read back.
    3. The balanced rate is measured before the race, in a lab without limit: ops and collectives are timed,
       and the rate is the one at which the bytes that a microbatch moves, in collectives and in messages to
       other pipeline ranks, which leave by the same card, take as long as its compute.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.racing import running
from benchmarks.work import RankWork
from stretto.errors import RunError
from stretto.lab import Lab

CORES = 2
"""Cores that the hosts of a race share, whatever the machine has, so that figures of machines compare."""


def lab_of(world: int, rate: str) -> Lab:
    """The lab of a race with a rank on each host.

    As many hosts as cores have a core each; more have equal parts of them, by quota. All stay on their core
    (tensor-parallel peers on different ones, so that both meet the same neighbours): measured with four hosts
    of half a core, a small collective cost 1 ms instead of 2, where hosts that moved about waited for each
    other. Without quotas neighbours on a core take turns of 4 ms, for which whatever crosses the network
    waits: of 14 cells of `predict` so measured, three were 10 to 12 % from their predictions.
    """
    return Lab(world, rate, CORES / world if world > CORES else None, pin=True)


def result_of(lab: Lab, module: str, setup: Mapping[str, Any], *words: str, what: str = "the race") -> Any:
    """What `run_worker(SETUP(**setup), *words)` of a module of `benchmarks` gives on rank 0.

    lab: one that is not up yet; what: what runs, as the error names it. Raises RunError when a rank fails,
    StrettoError when the machine cannot run a lab.
    """
    # Else PyTorch warns on every rank that it cannot look up names of hosts, and in a lab no one can.
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
    return [sys.executable, "-m", "benchmarks.labs", module, json.dumps(setup), str(out), *words]


def main(module: str, setup: str, out: str, *words: str) -> None:
    """The worker's entry. Every module's `SETUP` has `world` and `threads_per_rank`."""
    worker = import_module(f"benchmarks.{module}")
    made = worker.SETUP(**json.loads(setup))
    with running(made.world, made.threads_per_rank) as first:
        result = worker.run_worker(made, *words)
        if first:
            Path(out).write_text(json.dumps(result))


BALANCED = "balanced"
UNLIMITED = "unlimited"

PROBE = "probe"
"""The word that asks a worker for the work of each pipeline rank alone (`work.RankWork`)."""


class AskedRace(Protocol):
    """What a race is asked: a frozen dataclass of plain data, which in words is the race's name."""

    @property
    def rate(self) -> str:
        """As the lab takes it, or `BALANCED`."""
        ...

    @property
    def world(self) -> int: ...


AnyRace = TypeVar("AnyRace", bound=AskedRace)


def run_races(
    module: str,
    setups: Sequence[AnyRace],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    folder: Path | None = None,
) -> None:
    """Run all races. module: of `benchmarks`, whose `run_worker(setup, word)` every rank runs. keep: takes
    {"cores": ..., "races": [{"setup", "rows"}, ...]} after each, with those before it, so that an end before
    the last loses none. folder: where what ran is kept (`racing.keep_run`), a folder for each race and
    system. Raises RunError when ranks fail."""
    done: list[Any] = []
    for number, setup in enumerate(setups, 1):
        say(f"race {number} of {len(setups)}: {setup}")
        asked = setup.rate
        if asked == BALANCED:
            setup = _at(setup, balanced_rate(in_lab(module, _at(setup, UNLIMITED), PROBE)))
            say(f"the balanced rate is {setup.rate}")
        kept = "" if folder is None else str((folder / _folder_name(setup)).resolve())
        result = in_lab(module, setup, kept)
        result["setup"]["asked_rate"] = asked
        done.append(result)
        keep({"cores": CORES, "races": done})


def _at(setup: AnyRace, rate: str) -> AnyRace:
    made: AnyRace = replace(setup, rate=rate)  # type: ignore[type-var]
    return made


def _folder_name(setup: AskedRace) -> str:
    return str(setup).replace(",", "").replace(" ", "-")


def balanced_rate(ranks: Sequence[dict[str, float]]) -> str:
    """Step 3: the rate, as the lab takes it, for the work of each pipeline rank; the one with most compute
    counts. Where collectives take longer than compute without any limit, there is none: "unlimited"."""
    work = max((RankWork(**rank) for rank in ranks), key=lambda work: work.compute_us)
    if work.collective_us >= work.compute_us:
        return UNLIMITED
    mbit_per_s = 8.0 * (work.wire_bytes + work.message_bytes) / work.compute_us
    return f"{float(f'{mbit_per_s:.2g}'):g}mbit"  # more digits would be noise


def in_lab(module: str, setup: AskedRace, kept: str) -> Any:
    """Steps 1 and 2: what rank 0 gives."""
    lab = lab_of(setup.world, setup.rate)
    return result_of(lab, module, asdict(setup), kept, what=str(setup))  # type: ignore[call-overload]


if __name__ == "__main__":
    main(*sys.argv[1:])
