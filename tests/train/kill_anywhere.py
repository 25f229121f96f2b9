"""Kills, terminations and stops of a run anywhere: it ends soon, leaves no process, and resumes to the bit.

    PYTHONPATH=. python -m tests.train.kill_anywhere --count 60 --seed 0 --at-once 2 --folder /tmp/kills

1. One undisturbed run of each example, shortened, on a little text.
2. Each case draws a run, a signal, a phase, a moment in it and who gets the signal, all from the seed and
   its number. A stopped launcher that has no ranks is then terminated and continued: nobody else could.
3. The run must end within `LIMIT_S` with all its processes and without a traceback. Started again, it must
   come to its end with the losses, gradient norms, held-out losses, parameters and optimizer state of the
   undisturbed run, and a report.

Prints a table; the exit status says whether all were right.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from os import kill
from pathlib import Path
from threading import Lock

import torch
from tests.train.tiny import environment, ranks_of, run_ranks, write_text

from stretto.report.html import REPORT
from stretto.report.rundir import SUMMARY
from stretto.saving.tensors import stored_in
from stretto.train.checkpoint import read_tensors
from stretto.train.checkpoint_files import latest_in
from stretto.train.failure import process_state
from stretto.train.results import METRICS

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = ("moe_text", "gpt_text")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
STEPS = 12
LIMIT_S = 60.0
SHORT = (
    *("model.layers=2", "model.hidden=64", "model.context=32", "data.sequence_length=32"),
    *("data.vocab_size=512", "data.held_out_fraction=0.1", f"training.steps={STEPS}"),
    *(
        "training.global_batch=16",
        "training.eval_every=6",
        "training.eval_batches=2",
        "training.sample_tokens=16",
    ),
    *("checkpoint.every_steps=3", "training.log_every=4"),
)
PHASES = {
    "start": 2.0,
    "tokens": 2.0,
    "ranks": 6.0,
    "measuring": 6.0,
    "capturing": 3.0,
    "steps": 0.3,
    "checkpoint": 0.02,
    "held-out": 0.2,
    "summary": 0.0,
    "report": 0.1,
}
"""Phase -> seconds after its beginning up to which the signal comes."""


@dataclass(frozen=True)
class Case:
    """One disturbance. wait_s: after the phase began; step: for phases of steps, after how many."""

    number: int
    run: str
    signum: signal.Signals
    phase: str
    wait_s: float
    step: int
    victim: str


def draw(number: int, seed: int) -> Case:
    """The case of that number; runs, signals and phases take turns, so that each is there."""
    chance = random.Random(f"{seed} {number}")
    phase = list(PHASES)[number // 6 % len(PHASES)]
    victims = ("launcher",) if phase in ("start", "tokens") else ("launcher", "rank 0", "rank 1")
    return Case(
        number,
        RUNS[number % 2],
        SIGNALS[number % 3],
        phase,
        chance.uniform(0.0, PHASES[phase]),
        chance.randrange(1, STEPS),
        chance.choice(victims),
    )


class Drive:
    """Cases in a folder. `rows` are the lines of the table, `wrong` what was not right."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.text = write_text(self.folder / "text")
        self.wrong: list[str] = []
        self._lock, self._forks = Lock(), Lock()

    def config(self, name: str, run: str) -> Path:
        """A settings file whose run goes to `name` in the folder."""
        path = self.folder / f"{name}.toml"
        path.write_text((EXAMPLES / f"{run}.toml").read_text(encoding="utf-8"), encoding="utf-8")
        return path

    def command(self, name: str, config: Path, cache: str) -> list[str]:
        """What trains."""
        changes = [
            *SHORT,
            f"data.paths={json.dumps([str(self.text)])}",
            f"data.cache_dir={self.folder / cache}",
            f"output.run_dir={self.folder / name}",
        ]
        return ["train", str(config), *(word for change in changes for word in ("--set", change))]

    def start(self, name: str, config: Path, cache: str = "cache") -> subprocess.Popen[bytes]:
        """The run as a process, which says what it does in `name`.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "stretto", *self.command(name, config, cache)],
                env=environment(XDG_CACHE_HOME=str(self.folder / cache)),
                stdout=log,
                stderr=log,
            )

    def undisturbed(self, run: str) -> None:
        """Step 1."""
        if not (self.folder / run / REPORT).exists():
            assert self.start(run, self.config(run, run)).wait() == 0, (
                self.folder / f"{run}.log"
            ).read_text()

    def case(self, case: Case) -> str:
        """Steps 2 and 3: a row of the table."""
        name = f"case-{case.number:02d}"
        config, log = self.config(name, case.run), self.folder / f"{name}.log"
        cold = case.phase in ("tokens", "measuring")
        process = self.start(name, config, cache=f"{name}-cache" if cold else "cache")
        faults: list[str] = []
        begun = self.began(case, name, config)
        reached = wait(lambda: begun() or process.poll() is not None, 300.0) and process.poll() is None
        time.sleep(case.wait_s)
        at = {"launcher": process.pid} | {f"rank {rank}": pid for rank, pid in ranks_of(config).items()}
        victim = at.get(case.victim)
        if victim is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                kill(victim, case.signum)
        sent_s = time.monotonic()

        def gone() -> bool:
            if ranks_of(config):
                return False
            if process.poll() is None and (process_state(process.pid) or "")[:1] == ("T",):
                process.send_signal(signal.SIGTERM)
                process.send_signal(signal.SIGCONT)
            return process.poll() is not None

        if not wait(gone, LIMIT_S, every_s=0.1):
            faults.append("is still there")
            for pid in (*ranks_of(config).values(), process.pid):
                kill(pid, signal.SIGKILL)
        process.wait()
        took_s = time.monotonic() - sent_s
        if took_s > LIMIT_S:
            faults.append(f"ended after {took_s:.0f} s")
        text = log.read_text(encoding="utf-8", errors="replace")
        last = text.strip().splitlines()[-1].strip() if text.strip() else ""
        done = len(steps_of(self.folder / name))
        faults += self.resume(name, config)
        if b"Traceback" in log.read_bytes():
            faults.append("a traceback")
        faults += self.differs(name, case.run)
        with self._lock:
            self.wrong += [f"case {case.number}: {fault}" for fault in faults]
        when = f"{case.phase}{'' if reached else ' (over)'} + {case.wait_s:.2f} s"
        verdict = "; ".join(faults) or "same bits, report"
        return (
            f"| {case.number} | {case.run} | {case.signum.name} | {case.victim} | {when} "
            f"| {process.returncode} | {took_s:.1f} | {done} | {verdict} | {last[:90]} |"
        )

    def resume(self, name: str, config: Path) -> list[str]:
        """The two ranks go on, without a launcher, as forks; what was wrong."""
        command = self.command(name, config, "cache")
        with self._forks:
            ended = run_ranks(command, command, XDG_CACHE_HOME=str(self.folder / "cache"))
        with (self.folder / f"{name}.log").open("a", encoding="utf-8") as log:
            log.writelines(text for _, *texts in ended for text in texts)
        return [f"gone on with, rank {rank} ended with {one[0]}" for rank, one in enumerate(ended) if one[0]]

    def began(self, case: Case, name: str, config: Path) -> Callable[[], bool]:
        """Whether the phase of the case has begun."""
        log, place = self.folder / f"{name}.log", self.folder / name

        def said(words: str) -> bool:
            return words in log.read_text(encoding="utf-8", errors="replace")

        found: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "tokens": lambda: said("looking at settings, data"),
            "ranks": lambda: bool(ranks_of(config)),
            "measuring": lambda: said("  planning"),
            "capturing": lambda: said("  capturing"),
            "steps": lambda: len(steps_of(place)) >= case.step,
            "checkpoint": lambda: (
                len(steps_of(place)) >= case.step and any((place / "checkpoints").glob("*.tmp"))
            ),
            "held-out": lambda: len(steps_of(place)) >= STEPS,
            "summary": lambda: (place / SUMMARY).exists(),
            "report": lambda: (place / REPORT).exists(),
        }
        return found[case.phase]

    def differs(self, name: str, run: str) -> list[str]:
        """In what the run that was gone on with is not the undisturbed one."""
        faults = [f"no {file}" for file in (REPORT, SUMMARY) if not (self.folder / name / file).exists()]
        if lines_of(self.folder / name) != lines_of(self.folder / run):
            faults.append("other losses")
        checkpoints = [latest_in(self.folder / one / "checkpoints") for one in (name, run)]
        if None in checkpoints:
            return [*faults, "no checkpoint"]
        mine, other = (tensors_of(one) for one in checkpoints if one is not None)
        same = mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)
        return faults if same else [*faults, "other tensors"]

    def drive(self, cases: Sequence[Case], at_once: int) -> list[str]:
        """All cases; their rows."""
        for run in {case.run: None for case in cases}:
            self.undisturbed(run)
        with ThreadPoolExecutor(at_once) as pool:
            rows = []
            for row in pool.map(self.case, cases):
                print(row, flush=True)
                rows.append(row)
        return rows


def wait(done: Callable[[], bool], most_s: float, every_s: float = 0.002) -> bool:
    """Whether it came true in that time."""
    until_s = time.monotonic() + most_s
    while not done():
        if time.monotonic() > until_s:
            return False
        time.sleep(every_s)
    return True


def steps_of(place: Path) -> dict[int, float]:
    """step -> loss, of the whole lines so far."""
    found = {}
    with suppress(OSError):
        for line in (place / METRICS).read_bytes().splitlines():
            with suppress(ValueError, KeyError):
                data = json.loads(line)
                found[data["step"]] = data["loss"]
    return found


def lines_of(place: Path) -> dict[tuple[int, str], float]:
    """What must be equal: loss, gradient norm and held-out loss by step; the last line of a step counts."""
    found = {}
    for line in (place / METRICS).read_bytes().splitlines() if (place / METRICS).exists() else ():
        data = json.loads(line)
        found |= {
            (data["step"], key): data[key] for key in ("loss", "grad_norm", "held_out_loss") if key in data
        }
    return found


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds."""
    values = {
        name: torch.empty(one.shape, dtype=getattr(torch, one.dtype))
        for name, one in stored_in(checkpoint).items()
    }
    read_tensors(checkpoint, values)
    return values


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--folder", type=Path, required=True, help="where runs go; new, or of the same seed")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    drive = Drive(given.folder)
    print(
        "| case | run | signal | to | when | status | s to the end | steps done | gone on with | last words |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    cases = [draw(number, given.seed) for number in given.only or range(given.count)]
    drive.drive(cases, given.at_once)
    print(f"{len(cases)} cases, {len(drive.wrong)} wrong", *drive.wrong, sep="\n")
    return 1 if drive.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
