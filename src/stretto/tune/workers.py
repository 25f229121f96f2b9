"""Processes that work for a tuning. Each does one piece at a time, and none outlives the process that asks.

They are started anew (spawned), so that they share nothing with it. Signals are left to it; where it ends
without a word, they see the end of their pipe, or of it, and end as well.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from stretto.config import TrainSettings
from stretto.errors import StrettoError, UsageError
from stretto.price.cluster import Description
from stretto.train.interrupt import SIGNALS
from stretto.tune.outcome import Refused
from stretto.tune.work import Answer, Asked, Work


@dataclass(slots=True)
class Worker:
    """One process. busy: what it does; recent: keys of what it has traced, the latest last."""

    process: BaseProcess
    pipe: Connection
    busy: Asked | None = None
    recent: list[str] = field(default_factory=list)


class Workers:
    """So many processes, while it is entered."""

    def __init__(
        self,
        count: int,
        settings: TrainSettings,
        devices: int,
        found: Description,
        fixed: Mapping[str, Any],
        lost: Callable[[Asked], Refused],
    ) -> None:
        self._count = count
        self._given = (settings, devices, found, dict(fixed))
        self._lost = lost
        self.all: list[Worker] = []

    def __enter__(self) -> Workers:
        try:
            while len(self.all) < self._count:
                self.all.append(self._started())
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End all of them, whatever they do."""
        for worker in self.all:
            worker.pipe.close()
            worker.process.kill()
        for worker in self.all:
            worker.process.join()
        self.all = []

    def idle(self) -> list[Worker]:
        return [worker for worker in self.all if worker.busy is None]

    def give(self, worker: Worker, asked: Asked) -> None:
        """Let it begin."""
        worker.busy = asked
        with suppress(OSError):  # it has ended; `answers` sees that
            worker.pipe.send(asked)

    def answers(self, timeout_s: float) -> list[tuple[Asked, Answer]]:
        """What was done within so many seconds; returns at once when something was."""
        busy = {worker.pipe: worker for worker in self.all if worker.busy is not None}
        if not busy:
            return []
        found: list[tuple[Asked, Answer]] = []
        for pipe in wait(list(busy), timeout_s):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            assert worker.busy is not None
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                answer = self._lost(worker.busy)
                self.all[self.all.index(worker)] = self._started()
            if isinstance(answer, _Failed):
                if answer.of_user:
                    raise UsageError(answer.message)
                raise RuntimeError(
                    f"a process of the tuning failed at {worker.busy.candidate}\n{answer.message}"
                )
            found.append((worker.busy, answer))
            worker.busy = None
        return found

    def _started(self) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, *self._given), daemon=True, name="tune")
        # Blocked signals stay so in what is started: Ctrl-C, and what a scheduler sends to all processes, is
        # for the one that asks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Worker(process, ours)


@dataclass(frozen=True, slots=True)
class _Failed:
    """What made a worker fail. of_user: whether the message is for who gave the settings."""

    message: str
    of_user: bool


def _work(
    pipe: Connection, settings: TrainSettings, devices: int, found: Description, fixed: Mapping[str, Any]
) -> None:
    """The life of a worker."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    work: Work | None = None
    while True:
        try:
            asked = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Answer | _Failed
        try:
            if work is None:
                import torch

                torch.set_num_threads(1)
                work = Work(settings, devices, found, fixed)
            answer = work.do(asked)
        except StrettoError as error:
            answer = _Failed(str(error), True)
        except Exception:
            answer = _Failed(traceback.format_exc(), False)
        try:
            pipe.send(answer)
        except OSError:
            return


def _end_with(sentinel: Any) -> None:
    """A process that computes for long would not see that nobody waits for it."""
    wait([sentinel])
    os._exit(1)
