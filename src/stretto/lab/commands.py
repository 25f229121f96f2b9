"""The commands of all hosts at once: what they print, their ends, and signals to stop.

1. A command ends         -> note its status; end what its group left behind.
2. The first one fails    -> the others have `grace_s` to end by themselves, then get SIGTERM.
3. A stop signal arrives  -> pass it on to all, once; they have `grace_s` to end.
4. SIGTERM was not enough within 5 s, or a second stop signal arrives -> SIGKILL.

The caller notes the stop signals, and lets none of them raise. Making and removing namespaces then always
runs to its end; only waiting for commands is cut short.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO, Any, TextIO

_ONE_AT_A_TIME = threading.Lock()


class Printer(threading.Thread):
    """Reads a rank's stream to its end. kept: lines are kept there, and not printed. error: why nothing more
    could be printed; None so far."""

    def __init__(self, source: IO[bytes], target: TextIO, name: str, kept: list[str] | None = None) -> None:
        super().__init__(name=f"stretto lab: {name}", daemon=True)
        self._source, self._target, self._prefix = source, target, f"[{name}] "
        self.kept = kept
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        with self._source:
            for line in self._source:
                # Hosts may print anything, and the last line may have no end.
                text = self._prefix + line.decode(errors="replace").rstrip("\n") + "\n"
                if self.kept is not None:
                    self.kept.append(text)
                    continue
                try:
                    with _ONE_AT_A_TIME:
                        self._target.write(text)
                        self._target.flush()
                except Exception as error:
                    self.error = error
                    return


STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ending_by_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does, by an exception, so that labs are removed. Where the
    caller has handlers of its own or ignores them, and outside the main thread, nothing changes."""
    before: dict[int, Any] = {}

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as shells report it

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Keep the stop signals of this thread back until the block is done, so that all is cleaned up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


TERM_TO_KILL_S = 5.0  # assumed: time for a Python program to write its last lines after SIGTERM
LOOK_S = 0.005  # takes hosts no time; a rank that fails because another did takes longer to end
LAST_LINES_S = 1.0  # assumed: a straggler may keep a pipe open forever


class Statuses(list[int]):
    """Exit statuses by rank, 128 + n for a command that signal n ended. `first_failed` is the rank that
    failed first, `stopped_by` the signal that ended the run from outside, None if none did."""

    first_failed: int | None = None
    stopped_by: int | None = None

    @property
    def exit_status(self) -> int:
        """One status for the full run: 0 if every rank's is 0 and no one stopped it."""
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


def wait_for(
    processes: Sequence[subprocess.Popen[bytes]],
    printers: Sequence[Printer],
    grace_s: float,
    signals: list[int] | None = None,
) -> Statuses:
    """Wait until all have ended, each the leader of its own group. signals: those that arrive are noted
    there. Raises what hindered a printer."""
    statuses = Statuses([0] * len(processes))
    running = dict(enumerate(processes))
    term_at_s = kill_at_s = math.inf

    def send(number: int) -> None:
        for process in running.values():
            signal_group(process, number)

    while running:
        time.sleep(LOOK_S)
        for rank, process in list(running.items()):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Before the status is collected, while the id cannot belong to another process.
            signal_group(process, signal.SIGKILL)
            statuses[rank] = exit_status(process.wait())
            del running[rank]
            if statuses[rank] and statuses.first_failed is None:
                statuses.first_failed = rank
                if kill_at_s == math.inf:
                    term_at_s = time.monotonic() + grace_s
        for error in (printer.error for printer in printers if printer.error is not None):
            raise error
        while signals:
            number = signals.pop(0)
            if statuses.stopped_by is None:
                statuses.stopped_by = number
                send(number)
                term_at_s, kill_at_s = math.inf, time.monotonic() + grace_s
            else:
                kill_at_s = 0.0
        now_s = time.monotonic()
        if now_s >= term_at_s:
            send(signal.SIGTERM)
            term_at_s, kill_at_s = math.inf, now_s + TERM_TO_KILL_S
        if now_s >= kill_at_s:
            send(signal.SIGKILL)
            kill_at_s = math.inf
    for printer in printers:
        printer.join(LAST_LINES_S)
    return statuses
