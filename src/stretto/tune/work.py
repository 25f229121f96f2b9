"""Pieces of a tuning's work and what comes of them: a block is priced, a short step simulated, a plan made.

Each process does one piece at a time, and keeps what it traced. Processes are started again (spawned), so
that they share nothing with the one that asks. Signals are left to that one; where it ends without a word,
they end as well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import extract_tb
from typing import Any

import torch

from stretto.config import TrainSettings
from stretto.errors import PlanError, StrettoError
from stretto.ir.costs import Prediction
from stretto.planning.brief import Brief, brief
from stretto.planning.make_plan import plan
from stretto.price.cluster import Description
from stretto.train.interrupt import SIGNALS
from stretto.train.job import captures_of
from stretto.tune.block import TuneBlock, block_of, shares_of
from stretto.tune.choices import Candidate, Choices, Dealt, node_of
from stretto.verifying.memory import MemoryFault


@dataclass(frozen=True, slots=True)
class Asked:
    """A piece of work. order: of a plan; None prices a block. words: what the block's backward may compute
    again; stages: numbers of them of which the shares are asked for. short: whether a short step is simulated
    first, with pairs as `ahead` says (`stretto.planning.brief`), and a plan made only where that step is
    faster than best_us."""

    candidate: Candidate
    order: str | None
    words: tuple[str | int, ...] = ()
    stages: tuple[int, ...] = ()
    short: bool = False
    ahead: int | None = None
    best_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A candidate's plan. order: the policy that ordered its ops."""

    candidate: Candidate
    order: str
    made: Prediction

    @property
    def step_us(self) -> float:
        return self.made.step_us

    @property
    def exposed_us(self) -> dict[str, float]:
        """Axis -> the most of any rank."""
        return {axis: max(by) for axis, by in self.made.exposed_axis_us.items() if by}


@dataclass(frozen=True, slots=True)
class Refused:
    """why: in one line. bytes_needed: where memory is why, what the fullest rank needs, 0 if not known.
    by_memory: whether less to keep could help."""

    candidate: Candidate
    why: str
    by_memory: bool = False
    bytes_needed: int = 0


Answer = TuneBlock | Brief | Planned | Refused


@dataclass(slots=True)
class Tuned:
    """What a tuning results in.

    planned: the fastest first, in full or quickly (`Planned.order`). dropped: reason -> how many layouts,
    schedules or candidates; examples: one of each. layouts: how many were looked at; own: the settings' own,
    where it was planned. unseen_us: no candidate that was not planned and likely fits has a lower bound; None
    where all were. least: of what does not fit in memory, the candidate that needs least, and its bytes.
    stopped: why the search ended before it was done. larger: of candidates, kinds of what copies keep in
    parts that need more than a device has, and their bytes with as much computed again.
    """

    layouts: int = 0
    planned: list[Planned] = field(default_factory=list)
    own: Planned | Refused | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    unseen_us: float | None = None
    least: tuple[str, float] | None = None
    stopped: str = ""
    larger: dict[Candidate, dict[Dealt, float]] = field(default_factory=dict)

    def drop(self, reason: str, example: object = "", count: int = 1) -> None:
        """Count what is dropped for a reason."""
        self.dropped[reason] += count
        self.examples.setdefault(reason, str(example))

    def needs(self, what: object, nbytes: float) -> None:
        """Note what does not fit in memory."""
        if nbytes and (self.least is None or nbytes < self.least[1]):
            self.least = str(what), nbytes


class TuneWork:
    """What a process does, for one tuning."""

    def __init__(
        self, settings: TrainSettings, devices: int, cluster: Description, fixed: Mapping[str, Any]
    ) -> None:
        self._settings = settings
        self._choices = Choices(settings, devices, fixed, node_of(cluster))
        self._cluster = cluster
        self._captures = captures_of(settings, cluster)
        self._limit = cluster.memory_bytes

    def do(self, asked: Asked) -> Answer:
        """One piece. A refusal comes back with its words."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if asked.order is None:
                    return self._price(asked)
                if asked.short:
                    short = self._short(asked)
                    if isinstance(short, Refused) or short.step_us >= asked.best_us:
                        return short
                return self._plan(asked.candidate, asked.order)
            except StrettoError as error:
                return refused(asked.candidate, error)
            except Exception as error:  # of this candidate only; the others go on
                last = extract_tb(error.__traceback__)[-1]
                where = f"{last.filename}, line {last.lineno}"
                return Refused(
                    asked.candidate, f"failed with {type(error).__name__}: {error!s:.200} ({where})"
                )

    def _price(self, asked: Asked) -> TuneBlock:
        layout = asked.candidate.layout
        parallel = self._choices.settings_of(asked.candidate).parallel  # of which the layout counts
        rows = self._settings.training.global_batch / layout.pieces
        block = block_of(self._captures, parallel, self._cluster, asked.words, rows, self._choices.layers)
        return replace(block, shares=shares_of(self._captures, parallel, self._cluster, asked.stages))

    def _short(self, asked: Asked) -> Brief | Refused:
        job = self._captures.job(self._choices.settings_of(asked.candidate).parallel)
        assert asked.order is not None
        short = brief(job, self._cluster, asked.order, asked.ahead)
        if self._limit is None or short.peak_bytes <= self._limit:
            return short
        return Refused(asked.candidate, "a rank has more than a device has", True, short.peak_bytes)

    def _plan(self, candidate: Candidate, order: str) -> Planned:
        settings = self._settings
        job = self._captures.job(self._choices.settings_of(candidate).parallel)
        made = plan(
            job,
            self._cluster,
            order=order,
            steps=settings.training.steps,
            search_s=settings.planning.search_s,
        ).prediction
        assert made is not None
        return Planned(candidate, order, made)


def refused(candidate: Candidate, error: StrettoError) -> Refused:
    """The candidate with the words of its refusal in one line: what, and its first fault."""
    faults = error.faults if isinstance(error, PlanError) else []
    needs = [fault.holds_bytes for fault in faults if isinstance(fault, MemoryFault)]
    # A limit that cannot be kept is nothing but memory.
    by_memory = bool(needs) or (bool(faults) and isinstance(candidate.recompute, int))
    why = " ".join(str(error).split())
    if faults:
        why = f"{str(error).splitlines()[0].partition(':')[0]}: {faults[0]}"
    return Refused(candidate, why, by_memory, max(needs, default=0))


class Workers:
    """So many processes, while it is entered."""

    def __init__(self, count: int, *of: Any) -> None:
        """of: what `TuneWork` is made with."""
        self._count, self._of = count, of
        self._all: list[BaseProcess] = []
        self._free: list[Connection] = []
        self._busy: dict[Connection, Asked] = {}

    def __enter__(self) -> Workers:
        try:
            while len(self._all) < self._count:
                self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all of them, whatever they do."""
        for process in self._all:
            process.kill()
        for process in self._all:
            process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, *self._of), daemon=True)
        # Blocked signals stay so in what is started: Ctrl-C, and what a scheduler sends to all processes, is
        # for the one that asks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._all.append(process)
        self._free.append(ours)

    @property
    def free(self) -> bool:
        """Whether one has nothing to do."""
        return bool(self._free)

    def give(self, asked: Asked) -> None:
        """Let one that is free begin."""
        pipe = self._free.pop()
        with suppress(OSError):  # it ended while it had nothing to do, which shows as its answer is read
            pipe.send(asked)
        self._busy[pipe] = asked

    def answers(self, timeout_s: float) -> list[tuple[Asked, Answer]]:
        """What was done within so many seconds; returns at once when something was. Raises what
        keeps a process from beginning."""
        answers: list[tuple[Asked, Answer]] = []
        for pipe in wait(list(self._busy), timeout_s):
            assert isinstance(pipe, Connection)
            asked = self._busy.pop(pipe)
            try:
                answer: Answer | Exception = pipe.recv()
            except (EOFError, OSError):
                self._start()
                why = "its process was ended from outside; this machine's memory may be too small"
                answers.append((asked, Refused(asked.candidate, why)))
                continue
            if isinstance(answer, Exception):
                raise answer
            self._free.append(pipe)
            answers.append((asked, answer))
        return answers


def _serve(pipe: Connection, *of: Any) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_asker, daemon=True).start()
    try:
        work = TuneWork(*of)
    except Exception as error:
        pipe.send(error)
        return
    while True:
        pipe.send(work.do(pipe.recv()))


def _end_with_the_asker() -> None:
    """A process that computes for long would not see that no one waits for it."""
    asker = multiprocessing.parent_process()
    assert asker is not None
    asker.join()
    os._exit(1)
