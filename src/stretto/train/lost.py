"""Who was lost first, agreed on by the ranks that are left, when no launcher of ours sees ranks end.

1. Every rank that fails answers a roll call in the job's store before it does anything else.
2. A rank whose message was to or from one other rank is certain whom it misses: it writes that down,
   unless another has written before. What was written first is the cause; a rank that ends because of
   it has written before its neighbours miss it.
3. A rank that failed in a collective cannot know. It takes what another wrote, or else the only rank
   that has not answered the roll call within `ROLL_CALL_S`.
4. When the store is gone, so is rank 0, which keeps it, unless `torchrun`'s agent does.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

from stretto.train.notes import Cause, Note
from stretto.train.world import World

ROLL_CALL_S = 3.0
"""How long the others have to notice. All ranks meet in a collective every step, so that they notice within
one; a rank in a longer step is not counted as lost if another has been."""
STORE_S = 5.0
"""How long the store may take to answer a rank that is about to end."""
POLL_S = 0.05
_FIRST = "stretto/lost"


def agree(world: World, note: Note) -> Note:
    """The note of a rank that misses another, with the rank that was lost first, if that can be known."""
    if world.store is None or note.cause is not Cause.LOST:
        return note
    try:
        with _silent():
            world.store.set_timeout(timedelta(seconds=STORE_S))
            world.store.set(_present(world.rank), "1")
            first = _first(world, note)
    except RuntimeError:
        # Had rank 0 failed as the others do, it would have kept the store up for them to ask.
        first = note.lost if keeps_store_elsewhere() else 0
    if first is None or first in (note.lost, world.rank):
        return note
    message = (
        f"rank {note.rank}: rank {first} was lost, and this rank with it; resume from the last checkpoint"
    )
    return replace(note, message=message, lost=first)


def is_first_to_say(world: World, note: Note) -> bool:
    """Whether no other rank has said the same; ranks that refuse the same settings speak once."""
    if world.store is None or note.cause is not Cause.REFUSED:
        return True
    try:
        with _silent():
            world.store.set_timeout(timedelta(seconds=STORE_S))
            return int(world.store.add(_said(note), 1)) == 1
    except RuntimeError:
        return True


def wait_for_askers(world: World, note: Note, most_s: float) -> None:
    """Of the rank that keeps the store: until all ranks have asked `is_first_to_say`, or for `most_s`."""
    if world.store is None:
        return
    until_s = time.monotonic() + most_s
    with suppress(RuntimeError), _silent():
        while time.monotonic() < until_s and int(world.store.add(_said(note), 0)) < world.size:
            time.sleep(POLL_S)


def _said(note: Note) -> str:
    return f"stretto/said/{note.message}"


def keeps_store_elsewhere() -> bool:
    """Whether the job's store is kept by `torchrun`'s agent, which outlives its ranks, not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _first(world: World, note: Note) -> int | None:
    """Steps 2 and 3."""
    store = world.store
    assert store is not None
    if note.lost is not None:
        return int(store.compare_set(_FIRST, "", str(note.lost)).decode())
    until_s = time.monotonic() + ROLL_CALL_S
    while time.monotonic() < until_s:
        if store.check([_FIRST]):
            return int(store.get(_FIRST).decode())
        time.sleep(POLL_S)
    silent = [rank for rank in range(world.size) if not store.check([_present(rank)])]
    return silent[0] if len(silent) == 1 else None


def _present(rank: int) -> str:
    return f"stretto/present/{rank}"


@contextmanager
def _silent() -> Iterator[None]:
    """Keep PyTorch's own warnings and C++ frames about the store away from the user."""
    sys.stderr.flush()
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
