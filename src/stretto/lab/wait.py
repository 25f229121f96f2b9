"""Waits for the commands of all hosts at once: their ends, and signals to stop.

1. A command ends         -> note its status; end what its group left behind.
2. The first one fails    -> the others have `grace_s` to end by themselves, then get SIGTERM.
3. A stop signal arrives  -> pass it on to all, once; they have `grace_s` to end.
4. SIGTERM was not enough within 5 s, or a second stop signal arrives -> SIGKILL.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from stretto.lab.output import Printer
from stretto.lab.signals import StopSignals

TERM_TO_KILL_S = 5.0  # assumed: time for a Python program to write its last lines after SIGTERM
LOOK_S = 0.005  # takes hosts no time; a rank that fails because another did takes longer to end
LAST_LINES_S = 1.0  # assumed: a straggler may keep a pipe open for ever


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


def wait_for(
    processes: Sequence[subprocess.Popen[bytes]],
    printers: Sequence[Printer],
    grace_s: float,
    signals: StopSignals | None = None,
) -> Statuses:
    """Wait until all have ended, each the leader of its own group. Raises what hindered a printer."""
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
        while signals is not None and signals.received:
            number = signals.received.pop(0)
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
