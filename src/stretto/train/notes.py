"""How a rank failed, told to the launcher: each rank leaves a note, and one message is made of them.

Loads nothing of PyTorch by itself.
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stretto.errors import LostRankError, StrettoError
from stretto.files.typed_file import from_text, read_text, to_line
from stretto.train.interrupt import Interrupted
from stretto.train.launched import NOTES_DIR


class Cause(StrEnum):
    """refused: an error that the user can mend. lost: another rank is gone. interrupted: a signal.
    crashed: an exception that nobody foresaw."""

    REFUSED = "refused"
    LOST = "lost"
    INTERRUPTED = "interrupted"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Note:
    """Why a rank ended. step: optimizer steps done. at_s: the clock when it failed. lost: the rank that
    is gone, if known."""

    rank: int
    cause: Cause
    message: str
    status: int
    step: int
    at_s: float
    lost: int | None = None


def note_of(error: BaseException, rank: int, step: int, interrupted: Interrupted | None) -> Note:
    """The note of a rank that `error` ends; `interrupted` is what it had been told before."""
    from stretto.train.task import of_user

    at_s = time.time()
    # A signal that arrives inside a library comes out as another exception.
    if interrupted is not None:
        return Note(rank, Cause.INTERRUPTED, str(interrupted), interrupted.status, step, at_s)
    if isinstance(error, LostRankError):
        return Note(rank, Cause.LOST, str(error), error.exit_status, step, at_s, error.lost)
    if is_lost_connection(error):
        reason = str(error).strip().splitlines()[0]
        message = f"rank {rank}: another rank was lost; resume from the last checkpoint ({reason})"
        return Note(rank, Cause.LOST, message, 1, step, at_s)
    if isinstance(error, StrettoError):
        return Note(rank, Cause.REFUSED, str(error), error.exit_status, step, at_s)
    if (told := of_user(error)) is not None:
        return Note(rank, Cause.REFUSED, told, 1, step, at_s)
    if isinstance(error, SystemExit | BrokenPipeError):
        # How rich ends a program whose output nobody reads any more, as in `stretto train ... | head`.
        return Note(rank, Cause.REFUSED, "the output was closed before the run ended", 1, step, at_s)
    text = "".join(traceback.format_exception(error)).rstrip()
    return Note(rank, Cause.CRASHED, text, 1, step, at_s)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a RuntimeError of PyTorch's means that the other end of a connection is gone."""
    import torch.distributed as dist

    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "connection was closed", "gloo/")
    # PyTorch raises these when its store does not answer, or a peer does not come.
    gone = (dist.DistNetworkError, dist.DistStoreError)
    return isinstance(error, gone) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def leave_note(note: Note, folder: Path | None = None) -> bool:
    """Write the note where the launcher looks; False when there is none, or it cannot be written. folder: of
    notes; as the environment says without it."""
    told = os.environ.get(NOTES_DIR)
    if folder is None and told is None:
        return False
    path = (folder or Path(told or "")) / f"rank-{note.rank}.json"
    try:
        path.with_suffix(".tmp").write_text(to_line(note), encoding="utf-8")
        path.with_suffix(".tmp").rename(path)
    except OSError:
        return False
    return True


def read_notes(folder: Path) -> list[Note]:
    """The notes that ranks left, in the order in which they failed."""
    found = [from_text(Note, read_text(path), str(path)) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda note: note.at_s)
