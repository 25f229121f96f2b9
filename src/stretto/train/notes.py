"""How a rank failed, told to the launcher: each rank leaves a note, and one message is made of them.

Also tells ranks that no launcher of ours started who was lost first. May touch the job's store and the
folder of notes that the launcher gives.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

from stretto.errors import LostRankError, StrettoError
from stretto.train.interrupt import Interrupted
from stretto.train.world import World

NOTES_DIR = "STRETTO_NOTES_DIR"
"""Environment variable: where a launched rank leaves its note."""
STORE_S = 5.0
"""How long the job's store may take to answer a rank that is about to end."""


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
    if isinstance(error, SystemExit | BrokenPipeError):
        # How rich ends a program whose output nobody reads any more, as in `stretto train ... | head`.
        return Note(rank, Cause.REFUSED, "the output was closed before the run ended", 1, step, at_s)
    text = "".join(traceback.format_exception(error)).rstrip()
    return Note(rank, Cause.CRASHED, text, 1, step, at_s)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a RuntimeError of PyTorch's means that the other end of a connection is gone."""
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "connection was closed", "gloo/")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def leave_note(note: Note) -> bool:
    """Write the note where the launcher looks; False when there is none."""
    folder = os.environ.get(NOTES_DIR)
    if folder is None:
        return False
    path = Path(folder) / f"rank-{note.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(note)), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)
    return True


def read_notes(folder: Path) -> list[Note]:
    """The notes that ranks left, in the order in which they failed."""
    found = []
    for path in folder.glob("rank-*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        found.append(Note(**{**data, "cause": Cause(data["cause"])}))
    return sorted(found, key=lambda note: note.at_s)


def agree_on_lost(world: World, note: Note) -> Note:
    """The note with the rank that was lost first, for ranks without a launcher that sees them end.

    The first rank to miss another writes that into the job's store before it ends itself, so those who
    then miss this one find the first. When the store is gone, the rank that kept it, rank 0, died without
    a word: had it failed like the others, it would have kept the store up for a while.
    """
    if world.store is None or note.cause is not Cause.LOST:
        return note
    mine = "" if note.lost is None else str(note.lost)
    try:
        world.store.set_timeout(timedelta(seconds=STORE_S))
        if mine:
            first = world.store.compare_set("stretto/lost", "", mine).decode()
        else:
            first = world.store.get("stretto/lost").decode()
    except RuntimeError:
        # The launcher of `torchrun` keeps the store in a process of its own, which outlives its ranks.
        first = mine if keeps_store_elsewhere() else "0"
    if first == mine or not first.isdigit():
        return note
    message = (
        f"rank {note.rank}: rank {first} was lost, and this rank with it; resume from the last checkpoint"
    )
    return Note(note.rank, note.cause, message, note.status, note.step, note.at_s, int(first))


def is_first_to_say(world: World, note: Note) -> bool:
    """Whether no other rank has said the same; ranks that refuse the same settings speak once."""
    if world.store is None or note.cause is not Cause.REFUSED:
        return True
    try:
        world.store.set_timeout(timedelta(seconds=STORE_S))
        return int(world.store.add(f"stretto/said/{note.message}", 1)) == 1
    except RuntimeError:
        return True


def keeps_store_elsewhere() -> bool:
    """Whether the job's store is kept by the launcher, not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
