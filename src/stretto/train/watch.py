"""A launcher and its ranks end when one of them is stopped (SIGSTOP): its connections stay open, and nothing
else would show it. A stopped process can end by no signal but SIGKILL.

    1. The launcher looks at its ranks. It kills one that is stopped for `STOPPED_S`, and records in which
       phase the rank was.
    2. Each rank looks at its launcher. If that is gone, the rank ends at once. If it is stopped for so
       long, the rank records that, continues the launcher, which prints it, and ends.

This holds from the start of a rank's process to its end. Reads /proc; where there is none, only a launcher
that is gone is noticed. Loads nothing of PyTorch: ranks may be stopped while they load it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stretto.train.failure import (
    LAUNCHER_PID,
    Cause,
    RankFailure,
    current_phase,
    phase_of,
    record_failure,
)

STOPPED_S = 30.0
"""How long a process may be stopped. With what it takes to end on a busy machine, the run is over within a
minute."""
WATCH_S = 1.0
"""How often they look at each other."""
PROC = Path("/proc")


def lost_words(rank: int, for_s: float, phase: str) -> str:
    """How to report a rank that gives no sign of life for so long. phase: what it did last."""
    at = f" (phase: {phase})" if phase else ""
    return (
        f"rank {rank} has given no sign of life for {for_s:.0f} s; it was stopped, or its machine "
        f"hangs{at}. Look at it; resume from the last checkpoint"
    )


def process_state(pid: int) -> tuple[str, int] | None:
    """A process's state by one letter (T: stopped) and its parent; None where that is not known."""
    with suppress(OSError, ValueError, IndexError):
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)
    return None


def stopped_ranks(launcher: int) -> dict[int, int]:
    """rank -> process id, of the launcher's ranks that are stopped."""
    ranks: dict[int, int] = {}
    with suppress(OSError):
        for folder in PROC.iterdir():
            if folder.name.isdigit() and process_state(int(folder.name)) == ("T", launcher):
                with suppress(OSError):
                    for variable in (folder / "environ").read_bytes().split(b"\0"):
                        if variable.startswith(b"RANK="):
                            ranks[int(variable.removeprefix(b"RANK="))] = int(folder.name)
    return ranks


@contextmanager
def watching_ranks(folder: Path) -> Iterator[None]:
    """Step 1, by a thread of the launcher, while the context lasts. folder: that of records."""
    over = threading.Event()

    def watch() -> None:
        since_s: dict[int, float] = {}
        while not over.wait(WATCH_S):
            stopped, now_s = stopped_ranks(os.getpid()), time.monotonic()
            since_s = {rank: since_s.get(rank, now_s) for rank in stopped}
            for rank, pid in stopped.items():
                if now_s - since_s[rank] > STOPPED_S:
                    words = lost_words(rank, STOPPED_S, phase_of(folder, rank))
                    record_failure(RankFailure(rank, Cause.LOST, words, 1, 0, time.time(), rank), folder)
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, name="stopped ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def watch_launcher() -> None:
    """Step 2, by a thread of a rank that a launcher of ours started, to the rank's end."""
    launcher = os.environ.get(LAUNCHER_PID, "")
    if launcher.isdigit():
        args = (int(launcher),)
        threading.Thread(target=_watch_launcher, args=args, name="launcher watch", daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    since_s = time.monotonic()
    while os.getppid() == launcher:
        time.sleep(WATCH_S)
        state = process_state(launcher)
        if state is None or state[0] != "T":
            since_s = time.monotonic()
        elif time.monotonic() - since_s > STOPPED_S:
            words = (
                f"the launcher (process {launcher}) was stopped for {STOPPED_S:.0f} s, and the ranks have "
                f"ended (phase: {current_phase()})"
            )
            rank = int(os.environ.get("RANK", "0"))
            record_failure(RankFailure(rank, Cause.LOST, words, 1, 0, time.time()))
            with suppress(OSError):
                os.kill(launcher, signal.SIGCONT)
            break
    os._exit(1)
