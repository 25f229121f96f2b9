"""How a rank failed, and in which phase it is: what a launcher or another rank needs to explain an end.

A rank of our own launcher records both as files in the launcher's folder, and the launcher makes one message
of them. Loads nothing of PyTorch: a rank may be ended while it loads that.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from stretto.errors import LostRankError, StrettoError
from stretto.train.interrupt import Interrupted

LAUNCHER_PID = "STRETTO_LAUNCHER_PID"
"""Environment variable: our own launcher's process, for the ranks that it started."""
RECORDS_DIR = "STRETTO_RECORDS_DIR"
"""Environment variable: where these ranks record phase and failure."""

_phase = [""]


def is_worker() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether that launcher was our own (`stretto.train.launch`), which prints for its ranks."""
    return is_worker() and LAUNCHER_PID in os.environ


def enter_phase(phase: str) -> None:
    """What this process does from now on, in words, for whoever must explain where it was lost."""
    _phase[0] = phase
    if is_launched() and RECORDS_DIR in os.environ:
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
    crashed: an exception that nobody foresaw."""

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

    # A signal that arrives inside a library comes out as another exception.
    if interrupted is not None:
        return failure(Cause.INTERRUPTED, str(interrupted), interrupted.status)
    if isinstance(error, LostRankError):
        return failure(Cause.LOST, str(error), error.exit_status, error.lost)
    if is_lost_connection(error):
        reason = str(error).strip().splitlines()[0]
        words = f"rank {rank}: another rank was lost; resume from the last checkpoint ({reason})"
        return failure(Cause.LOST, words)
    if isinstance(error, StrettoError):
        return failure(Cause.REFUSED, str(error), error.exit_status)
    if (words_of_task := of_user(error)) is not None:
        return failure(Cause.REFUSED, words_of_task)
    if isinstance(error, SystemExit | BrokenPipeError):
        # How rich ends a program whose output nobody reads any more, as in `stretto train ... | head`.
        return failure(Cause.REFUSED, "the output was closed before the run ended")
    return failure(Cause.CRASHED, "".join(traceback.format_exception(error)).rstrip())


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
