"""How a rank failed, in which phase it is, and whether it is stopped: what explains the end of a run.

A rank of our own launcher records phase and failure as files in the launcher's folder, and the launcher makes
one message of them. A process that is stopped (SIGSTOP) keeps its connections open, records nothing, and ends
by no signal but SIGKILL. So they look at each other, from the start of a rank's process to its end:

    1. The launcher kills a rank that is stopped for `STOPPED_S`, and records in which phase the rank was.
    2. A rank whose launcher is gone ends at once. If the launcher is stopped for so long, the rank records
       that, continues the launcher, which prints it, and ends.

Reads /proc; where there is none, only a launcher that is gone is noticed. Loads nothing of PyTorch: a rank
may be ended while it loads that.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from stretto.errors import LostRankError, StrettoError
from stretto.train.interrupt import Interrupted

LAUNCHER_PID = "STRETTO_LAUNCHER_PID"
"""Environment variable: our own launcher's process, for the ranks that it started."""
PRELOAD = "STRETTO_PRELOAD"
"""Environment variable: of the process that our launcher's ranks are forks of (`stretto.train.preload`), the
socket to it."""
RECORDS_DIR = "STRETTO_RECORDS_DIR"
"""Environment variable: where these ranks record phase and failure."""
GOES_ON = "STRETTO_GOES_ON"
"""Environment variable: of ranks that our launcher has started again, to go on from the newest checkpoint."""

STOPPED_S = 30.0
"""How long a process may be stopped. With what it takes to end on a busy machine, the run is over within a
minute."""
WATCH_S = 1.0
"""How often they look at each other."""
PROC = Path("/proc")
NAME = "rank"
"""With its number, the name of a rank's process, as `top` and `ps -o comm` show it."""

_phase = [""]


def is_worker() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether that launcher was our own (`stretto.train.launch`), which prints for its ranks, and for the
    process that they are forks of."""
    return PRELOAD in os.environ or (is_worker() and LAUNCHER_PID in os.environ)


def enter_phase(phase: str) -> None:
    """What this process does from now on, in words, for anyone who must explain where it was lost."""
    _phase[0] = phase
    if is_worker() and is_launched() and RECORDS_DIR in os.environ:
        with suppress(OSError):
            path = Path(os.environ[RECORDS_DIR]) / f"phase-{os.environ['RANK']}"
            path.write_text(phase, encoding="utf-8")


def current_phase() -> str:
    """The phase that this process has entered last."""
    return _phase[0]


def phase_of(folder: Path, rank: int) -> str:
    """The phase that a launched rank has entered last. folder: that of records."""
    with suppress(OSError, UnicodeDecodeError):
        return (folder / f"phase-{rank}").read_text(encoding="utf-8")
    return "the start of its process"


class Cause(StrEnum):
    """refused: an error that the user can mend. lost: another rank is gone. interrupted: a signal.
    crashed: an exception that no one foresaw."""

    REFUSED = "refused"
    LOST = "lost"
    INTERRUPTED = "interrupted"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a rank ended. step: optimizer steps done. at_s: the clock when it failed. lost: the rank that
    is gone, if known."""

    rank: int
    cause: Cause
    message: str
    status: int
    step: int
    at_s: float
    lost: int | None = None


def failure_of(error: BaseException, rank: int, step: int, interrupted: Interrupted | None) -> RankFailure:
    """The failure of a rank that `error` ends; `interrupted` is the signal that came before, if one did."""
    from stretto.train.task import of_user

    def failure(cause: Cause, message: str, status: int = 1, lost: int | None = None) -> RankFailure:
        return RankFailure(rank, cause, message, status, step, time.time(), lost)

    if isinstance(error, Interrupted):  # as ranks have agreed to end
        interrupted = error
    # A signal that arrives inside a library comes out as another exception.
    if interrupted is not None:
        return failure(Cause.INTERRUPTED, str(interrupted), interrupted.status)
    if isinstance(error, LostRankError):
        return failure(Cause.LOST, str(error), error.exit_status, error.lost)
    if is_lost_connection(error):
        reason = str(error).strip().splitlines()[0]
        words = f"rank {rank}: another rank was lost; resume from the last checkpoint ({reason})"
        return failure(Cause.LOST, words)
    if is_device(error):
        reason = str(error).strip().splitlines()[0]
        return failure(
            Cause.LOST, f"rank {rank}: its device failed ({reason}); resume from the last checkpoint"
        )
    if isinstance(error, StrettoError):
        return failure(Cause.REFUSED, str(error), error.exit_status)
    if (words_of_task := of_user(error)) is not None:
        return failure(Cause.REFUSED, words_of_task)
    if isinstance(error, SystemExit | BrokenPipeError):
        # How rich ends a program whose output no one reads any more, as in `stretto train ... | head`.
        return failure(Cause.REFUSED, "the output was closed before the run ended")
    return failure(Cause.CRASHED, "".join(traceback.format_exception(error)).rstrip())


def is_device(error: BaseException) -> bool:
    """Whether an error is of an accelerator itself, whatever it was asked for. A kernel that found wrong
    values, such as an index that is too large, is not."""
    import torch

    return isinstance(error, torch.AcceleratorError) and "device-side assert" not in str(error)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a RuntimeError of PyTorch's means that the other end of a connection is gone."""
    import torch.distributed as dist

    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "connection was closed", "gloo/")
    # PyTorch raises these when its store does not answer, or a peer does not come.
    gone = (dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, gone) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def record_failure(failure: RankFailure, folder: Path | None = None) -> bool:
    """Write the failure where the launcher looks; False when there is none, or it cannot be written. folder:
    of records; without it, the one that the environment names."""
    if folder is None:
        if RECORDS_DIR not in os.environ:
            return False
        folder = Path(os.environ[RECORDS_DIR])
    path = folder / f"failure-{failure.rank}.json"
    try:
        path.with_suffix(".tmp").write_text(json.dumps(asdict(failure)), encoding="utf-8")
        path.with_suffix(".tmp").rename(path)
    except OSError:
        return False
    return True


def recorded_failures(folder: Path) -> list[RankFailure]:
    """The failures that ranks recorded, in the order in which they came."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("failure-*.json")]
    failures = [RankFailure(**{**record, "cause": Cause(record["cause"])}) for record in records]
    return sorted(failures, key=lambda failure: failure.at_s)


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


def named_rank(folder: Path) -> int | None:
    """The rank that a process is by its name (`watch_launcher`). folder: its own in /proc."""
    with suppress(OSError):
        word, _, number = (folder / "comm").read_text(encoding="utf-8", errors="replace").partition(" ")
        if word == NAME and number.strip().isdigit():
            return int(number)
    return None


def stopped_ranks(launcher: int) -> dict[int, int]:
    """rank -> process id, of the launcher's ranks that are stopped."""
    ranks: dict[int, int] = {}
    with suppress(OSError):
        for folder in PROC.iterdir():
            if folder.name.isdigit() and process_state(int(folder.name)) == ("T", launcher):
                rank = named_rank(folder)
                if rank is not None:
                    ranks[rank] = int(folder.name)
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
    """Step 2, by a thread of a rank that a launcher of ours started, to the rank's end. The rank's process is
    named, for the launcher and the user."""
    launcher = os.environ.get(LAUNCHER_PID, "")
    if launcher.isdigit():
        with suppress(OSError):
            (PROC / "self" / "comm").write_text(f"{NAME} {os.environ['RANK']}", encoding="utf-8")
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
