"""Waits for the commands of all hosts at once: their ends, their output, and signals to stop.

One loop over file descriptors (pipes, process descriptors, the signal pipe), with no thread and no polling,
so that a lab that only waits takes no processor time from its hosts.

    1. A command ends         -> note its status; end what its group left behind.
    2. The first one fails    -> the others have `grace_s` to end by themselves, then get SIGTERM.
    3. A stop signal arrives  -> pass it on to all, once; they have `grace_s` to end.
    4. SIGTERM was not enough within 5 s, or a second stop signal arrives -> SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stretto.lab.output import Prefixer
from stretto.lab.signals import StopSignals

TERM_TO_KILL_S = 5.0  # assumed: time for a Python program to write its last lines after SIGTERM
_CHUNK_BYTES = 1 << 16  # the capacity of a pipe on Linux


class Statuses(list[int]):
    """Exit statuses by rank (by host, where each has one), 128 + n for a command that signal n ended.

    `first_failed` is the rank that failed first, None if none did; `stopped_by` the signal that ended the
    run from outside, None if none did.
    """

    first_failed: int | None = None
    stopped_by: int | None = None

    @property
    def exit_status(self) -> int:
        """One status for the whole run: 0 if every rank's is 0 and nobody stopped it."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 0 if self.first_failed is None else self[self.first_failed]


def exit_status(returncode: int) -> int:
    """A shell's status for what `subprocess` reports: -15 becomes 143."""
    return 128 - returncode if returncode < 0 else returncode


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a command and to what it started; nothing happens if all are gone."""
    # Every command leads a session, so that its group is its own and bears its id.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@dataclass
class Waiter:
    """The loop's state. `processes[i]` is rank i and leads its own group."""

    processes: list[subprocess.Popen[bytes]]
    grace_s: float
    signals: StopSignals | None = None
    statuses: Statuses = field(init=False)

    def __post_init__(self) -> None:
        self.statuses = Statuses([0] * len(self.processes))
        self._running = set(range(len(self.processes)))
        self._selector = selectors.DefaultSelector()
        self._term_at_s: float | None = None
        self._kill_at_s: float | None = None

    def wait(self, prefixers: list[tuple[int, Prefixer]]) -> Statuses:
        """Wait for the end of all; each prefixer is fed from the descriptor beside it."""
        with self._selector, contextlib.ExitStack() as opened:
            for fd, prefixer in prefixers:
                os.set_blocking(fd, False)
                self._on(fd, lambda fd=fd, prefixer=prefixer: self._read(fd, prefixer))  # type: ignore[misc]
            for rank, process in enumerate(self.processes):
                end = os.pidfd_open(process.pid)
                opened.callback(os.close, end)
                self._on(end, lambda rank=rank, end=end: self._ended(rank, end))  # type: ignore[misc]
            if self.signals is not None:
                self._on(self.signals.fd, self._stop)
            while self._running:
                for key, _ in self._selector.select(self._timeout_s()):
                    key.data()
                self._deadlines()
            for fd, prefixer in prefixers:
                if fd in self._selector.get_map():
                    self._read(fd, prefixer)  # a pipe holds one chunk at most; a straggler may keep it open
                prefixer.close()
        return self.statuses

    def _on(self, fd: int, call: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, call)

    def _read(self, fd: int, prefixer: Prefixer) -> None:
        # One chunk a turn: a host that never stops printing must not keep the loop from the others.
        with contextlib.suppress(BlockingIOError):
            if chunk := os.read(fd, _CHUNK_BYTES):
                prefixer.feed(chunk)
            else:
                self._selector.unregister(fd)

    def _ended(self, rank: int, end: int) -> None:
        self._selector.unregister(end)
        # Before the status is collected, while the id cannot belong to another process.
        signal_group(self.processes[rank], signal.SIGKILL)
        status = exit_status(self.processes[rank].wait())
        self.statuses[rank] = status
        self._running.discard(rank)
        if status != 0 and self.statuses.first_failed is None:
            self.statuses.first_failed = rank
            if self._term_at_s is None and self._kill_at_s is None:
                self._term_at_s = time.monotonic() + self.grace_s

    def _stop(self) -> None:
        assert self.signals is not None
        for number in self.signals.take():
            if self.statuses.stopped_by is None:
                self.statuses.stopped_by = number
                self._send(number)
                self._term_at_s, self._kill_at_s = None, time.monotonic() + self.grace_s
            else:
                self._kill_at_s = time.monotonic()

    def _deadlines(self) -> None:
        now_s = time.monotonic()
        if self._term_at_s is not None and now_s >= self._term_at_s:
            self._send(signal.SIGTERM)
            self._term_at_s, self._kill_at_s = None, now_s + TERM_TO_KILL_S
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._send(signal.SIGKILL)
            self._kill_at_s = None

    def _timeout_s(self) -> float | None:
        deadlines = [at_s for at_s in (self._term_at_s, self._kill_at_s) if at_s is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _send(self, number: int) -> None:
        for rank in self._running:
            signal_group(self.processes[rank], number)
