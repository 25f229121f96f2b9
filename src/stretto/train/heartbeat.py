"""Signs of life between ranks, apart from their steps: who is stopped is missed.

Its connections stay open, so that those who wait for it would learn nothing until the transport's timeout.

    1. While it trains, each rank writes a beat into the job's store every `BEAT_S`, from a thread of its own:
       a step may take as long as it likes.
    2. Each rank looks at the beats of the next one. If they stop for `LOST_AFTER_S`, that rank is lost.
    3. A rank that was itself stopped begins to count anew: what it missed says nothing of others.

May touch the job's store, and continue a stopped rank of the same launcher, so that it can be ended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from stretto.train.launched import is_launched
from stretto.train.lost import keeps_store_elsewhere
from stretto.train.world import World

BEAT_S = 5.0
LOST_AFTER_S = 40.0
"""Assumed: no thread of a living process waits so long for the interpreter. With a beat, and what it takes to
end, a run that has lost a rank so is over within a minute."""
STORE_S = 10.0
"""How long the store may take to answer; one that does not is taken for lost with the rank that keeps it."""
_DONE = b"done"


class Heartbeat:
    """Beats while the context lasts. lost: called with the number of a rank that is missed, by the thread."""

    def __init__(self, world: World, lost: Callable[[int], None]) -> None:
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
                self._store.set(_key(own), f"{beats} {os.getpid()} {os.getppid()}")
                found = self._store.get(_key(watched)) if self._store.check([_key(watched)]) else b""
            except RuntimeError:
                found, silent = seen, True
            looked = time.monotonic()
            if found != seen or not found:
                seen, heard = found, looked
            elif found != _DONE and looked - heard > LOST_AFTER_S:
                self._ended.set()
                _continue(seen)
                self._lost(0 if silent and not keeps_store_elsewhere() else watched)
        with suppress(RuntimeError):
            self._store.set(_key(own), _DONE.decode())


def _key(rank: int) -> str:
    return f"stretto/beat/{rank}"


def _continue(beat: bytes) -> None:
    """Continue a stopped process of the same launcher: signals that shall end it wait for that."""
    _, pid, parent = beat.decode().split()
    if not is_launched() or int(parent) != os.getppid():
        return
    with suppress(OSError, IndexError):
        told = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        if int(told.split()[1]) == os.getppid():
            os.kill(int(pid), signal.SIGCONT)
