"""Signs of life between ranks, apart from their steps: who is stopped is missed.

Its connections stay open, so that those who wait for it would learn nothing until the transport's timeout.
Ranks of our own launcher are watched by that as well (`stretto.train.stopped`).

    1. From where it meets the others to where it leaves them, each rank writes a beat, with its phase, into
       the job's store every `BEAT_S`, from a thread of its own: a step may take as long as it likes.
    2. Each rank looks at the beats of the next one. If they stop for `LOST_AFTER_S`, that rank is lost.
    3. A rank that was itself stopped begins to count anew: what it missed says nothing of others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from stretto.train.launched import this_phase
from stretto.train.lost import keeps_store_elsewhere
from stretto.train.world import World

BEAT_S = 5.0
LOST_AFTER_S = 40.0
"""After so long without a beat a rank is lost. Assumed: no thread of a living process waits so long for the
interpreter. With a beat, and what it takes to end, the run is over within a minute."""
STORE_S = 10.0
"""How long the store may take to answer; one that does not is taken for lost with the rank that keeps it."""
_DONE = b"done"


class Heartbeat:
    """Beats while the context lasts. lost: called by the thread with the number of a rank that is missed and
    the phase that it told last."""

    def __init__(self, world: World, lost: Callable[[int, str], None]) -> None:
        self._world = world
        self._lost = lost
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeat:
        store = self._world.store
        if store is not None and self._world.size > 1 and hasattr(store, "clone"):
            # A connection of its own: on the job's, a call that waits keeps all others out.
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=STORE_S))
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(BEAT_S)

    def _beat(self) -> None:
        """Steps 1 to 3."""
        own, watched = self._world.rank, (self._world.rank + 1) % self._world.size
        seen, beats = b"", 0
        looked = heard = time.monotonic()
        while not self._ended.wait(BEAT_S if beats else 0.0):  # the first beat at once
            now, beats = time.monotonic(), beats + 1
            if now - looked > 2 * BEAT_S + STORE_S:
                heard = now
            silent = False
            try:
                self._store.set(_key(own), f"{beats} {this_phase()}")
                found = self._store.get(_key(watched)) if self._store.check([_key(watched)]) else b""
            except RuntimeError:
                found, silent = seen, True
            looked = time.monotonic()
            if found != seen or not found:
                seen, heard = found, looked
            elif found != _DONE and looked - heard > LOST_AFTER_S:
                self._ended.set()
                gone = 0 if silent and not keeps_store_elsewhere() else watched
                self._lost(gone, seen.decode().partition(" ")[2])
        with suppress(RuntimeError):
            self._store.set(_key(own), _DONE.decode())


def _key(rank: int) -> str:
    return f"stretto/beat/{rank}"
