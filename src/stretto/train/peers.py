"""What ranks send each other besides their steps, through the job's store: signs of life, and who was lost
first.

A process that is stopped keeps its connections open, and a rank may miss one that only followed another. Our
own launcher sees both (`stretto.train.failure`); under torchrun or a batch system ranks do it themselves.

    1. Each rank writes a beat with its phase every `BEAT_S`, from a thread of its own, since a step may take
       as long as it likes. It looks at the beats of the next rank, which is lost if they stop for
       `LOST_AFTER_S`.
    2. Each rank that ends, well or not, writes that down, and is not missed.
    3. A rank that misses another answers a roll call first. If its message was to or from one other rank, it
       is certain whom it misses, and writes that down, unless another has written before. What was written
       first is the cause.
    4. A rank that failed in a collective cannot know. It takes what another wrote, or else the only rank
       that has not answered the roll call within `ROLL_CALL_S`.
    5. When the store is gone, so is rank 0, which keeps it, unless `torchrun`'s agent does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from stretto.train.failure import Cause, RankFailure, current_phase
from stretto.train.world import World

BEAT_S = 5.0
LOST_AFTER_S = 40.0
"""After so long without a beat a rank is lost. Assumed: no thread of a living process waits so long for the
interpreter. With a beat, and what it takes to end, the run is over within a minute."""
BEAT_STORE_S = 10.0
"""How long the store may take to answer a beat; one that does not is lost with the rank that keeps it."""
ROLL_CALL_S = 3.0
"""How long the others have to notice. All ranks meet in a collective every step, so that they notice within
one; a rank in a longer step is not counted as lost if another has been."""
END_STORE_S = 5.0
"""How long the store may take to answer a rank that is about to end."""
LINGER_S = 3.0
"""How long rank 0 keeps the store up after a failure, for the others to read what they need of it."""
POLL_S = 0.05
_FIRST = "stretto/lost"


@contextmanager
def heartbeat(world: World, lost: Callable[[int, str], None]) -> Iterator[None]:
    """Beat while the context lasts. lost: called by the thread with the number of a rank that is missed and
    the phase that it entered last."""
    if world.store is None or world.size == 1 or not hasattr(world.store, "clone"):
        yield
        return
    # A connection of its own: on the job's, a call that waits keeps all others out.
    store, over = world.store.clone(), threading.Event()
    store.set_timeout(timedelta(seconds=BEAT_STORE_S))
    thread = threading.Thread(target=_beat, args=(world, store, over, lost), name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(BEAT_S)


def _beat(world: World, store: Store, over: threading.Event, lost: Callable[[int, str], None]) -> None:
    """Steps 1 and 2."""
    watched = (world.rank + 1) % world.size
    beats_of = f"stretto/beat/{watched}"
    neighbour, beats = Neighbour(time.monotonic()), 0
    while not over.wait(BEAT_S if beats else 0.0):  # the first beat at once
        asked_s, beats, silent = time.monotonic(), beats + 1, False
        beat, ended = neighbour.beat, False
        try:
            store.set(f"stretto/beat/{world.rank}", f"{beats} {current_phase()}")
            beat = store.get(beats_of) if store.check([beats_of]) else b""
            ended = store.check([f"stretto/ended/{watched}"])
        except RuntimeError:
            silent = True
        if neighbour.is_lost(beat, ended, asked_s, time.monotonic()):
            over.set()
            gone = 0 if silent and not agent_keeps_store() else watched
            lost(gone, beat.decode().partition(" ")[2])
    with suppress(RuntimeError):
        store.set(f"stretto/ended/{world.rank}", "1")


class Neighbour:
    """Another rank, by its last beat, as one thread sees it. Times are seconds of that thread's clock."""

    def __init__(self, now_s: float) -> None:
        self.beat = b""
        self._looked_s = self._heard_s = now_s

    def is_lost(self, beat: bytes, ended: bool, asked_s: float, now_s: float) -> bool:
        """Whether it has given no sign of life for too long. beat: what the store had when it was asked,
        b"" before the first. ended: whether the rank has written that it ends."""
        if asked_s - self._looked_s > 2 * BEAT_S + BEAT_STORE_S:
            self._heard_s = asked_s  # who looks was itself stopped: what it missed shows nothing of others
        self._looked_s = now_s
        if beat != self.beat or not beat:
            self.beat, self._heard_s = beat, now_s
            return False
        return not ended and now_s - self._heard_s > LOST_AFTER_S


def lost_first(world: World, failure: RankFailure) -> RankFailure:
    """The failure of a rank that misses another, with the rank that was lost first, if that can be known."""
    if world.store is None or failure.cause is not Cause.LOST:
        return failure
    try:
        with _ending(world.store):
            world.store.set(f"stretto/present/{world.rank}", "1")
            first = _first(world, world.store, failure.lost)
    except RuntimeError:
        # Had rank 0 failed as the others do, it would have kept the store up for them to ask.
        first = failure.lost if agent_keeps_store() else 0
    if first is None or first in (failure.lost, world.rank):
        return failure
    message = (
        f"rank {failure.rank}: rank {first} was lost, and this rank with it; resume from the last checkpoint"
    )
    return replace(failure, message=message, lost=first)


def _first(world: World, store: Store, lost: int | None) -> int | None:
    """Steps 3 and 4."""
    if lost is not None:
        return int(store.compare_set(_FIRST, "", str(lost)).decode())
    until_s = time.monotonic() + ROLL_CALL_S
    while time.monotonic() < until_s:
        if store.check([_FIRST]):
            return int(store.get(_FIRST).decode())
        time.sleep(POLL_S)
    silent = [rank for rank in range(world.size) if not store.check([f"stretto/present/{rank}"])]
    return silent[0] if len(silent) == 1 else None


def is_first_to_print(world: World, failure: RankFailure) -> bool:
    """Whether no other rank has printed the same: ranks that refuse the same settings do so once."""
    if world.store is None or failure.cause is not Cause.REFUSED:
        return True
    try:
        with _ending(world.store):
            return int(world.store.add(f"stretto/printed/{failure.message}", 1)) == 1
    except RuntimeError:
        return True


def part(world: World, failure: RankFailure) -> None:
    """The last that a failed rank does. The one that keeps the store waits until the others have come here
    too, at most `LINGER_S`."""
    if world.store is None:
        return
    expected = world.size - (failure.cause is Cause.LOST)
    until_s = time.monotonic() + LINGER_S
    with suppress(RuntimeError), _ending(world.store):
        parted = int(world.store.add("stretto/parted", 1))
        keeps = world.rank == 0 and not agent_keeps_store()
        while keeps and parted < expected and time.monotonic() < until_s:
            time.sleep(POLL_S)
            parted = int(world.store.add("stretto/parted", 0))


def agent_keeps_store() -> bool:
    """Whether the job's store is kept by `torchrun`'s agent, which outlives its ranks, not by rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextmanager
def _ending(store: Store) -> Iterator[None]:
    """Ask the store, and keep PyTorch's own warnings and C++ frames about it away from the user."""
    store.set_timeout(timedelta(seconds=END_STORE_S))
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
