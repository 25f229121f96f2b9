"""Whether this rank stands: it waits for other ranks, and nothing in its process goes on.

Looked at from a thread of its own, once in a while. The rank stands since the first of a row of looks in
which all of this held:

1. The thread that makes the reshards waits in a reshard, or is in a communication of PyTorch
   (`frames_adapter`), and has not moved since the look before.
2. No byte was carried by any TCP connection of the process since the look before, but for those to the
   store, and none is under way. A slow network is no standstill: what is sent and not yet acknowledged is
   under way.
3. No other thread runs, would run, or waits for a disk, and the process uses hardly any processor time.
4. The process has not used an accelerator: its queue may be at work while the program waits for it. Nor is
   it on a system that does not tell about connections.

So a rank that computes, sleeps, reads or writes files, waits for data, a lock, a child, a debugger or a
person does not stand: it is busy, and may come. Where in doubt, the answer is that it does not stand.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import torch

from stretto.tensor.reshard.frames_adapter import Place, place_of
from stretto.tensor.reshard.process import Traffic, others_processor_s, others_work, traffic

BUSY_SHARE, BURST_S = 0.05, 0.01
"""A process is at work that uses more processor time than this share of the time, and a burst. Assumed: a
rank that waits wakes up for some milliseconds a second, and the one that keeps the store answers others."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait within a reshard. number: of the reshard. since_s: `time.monotonic()`. what: in words."""

    number: int
    since_s: float
    what: str


@dataclass(slots=True)
class Whereabouts:
    """What a rank says of itself, for its other thread to read.

    number: of the last reshard that it came to. thread: that makes the reshards. waits: in which it waits.
    told: whether the program has been given an error, and is on its own way since. hears: whether the other
    ranks know that this one needs not be told.
    """

    number: int = 0
    thread: int = field(default_factory=threading.get_ident)
    waits: Waiting | None = None
    told: bool = False
    hears: bool = False


@dataclass(frozen=True, slots=True)
class _Seen:
    at_s: float
    mark: object
    traffic: Traffic
    processor_s: float


class Standing:
    """Looks at this rank. store_port: of the store that all ranks ask, the looks themselves among them."""

    def __init__(self, here: Whereabouts, store_port: int) -> None:
        self._here = here
        self._store_port = store_port
        self._seen: _Seen | None = None
        self._since_s = 0.0
        self.episode = 0
        """Counts the times that it has begun to stand: equal numbers, and it has stood all the time."""

    def look(self) -> float:
        """Look again. Returns for how many seconds it has stood; 0.0 if it does not."""
        before, self._seen = self._seen, self._look()
        if self._seen is None:
            return 0.0
        if before is None or not _still(before, self._seen):
            self.episode += 1
            self._since_s = self._seen.at_s
        return self._seen.at_s - self._since_s

    def text(self) -> str:
        """Where it stands, in words, for all ranks to read."""
        place, waits = place_of(self._here.thread), self._here.waits
        at = "an unknown place" if place is None else place.text()
        if waits is not None:
            return f"waits in reshard number {waits.number} ({waits.what}), at {at}"
        return f"has come to reshard number {self._here.number}, and stands at {at}"

    def _look(self) -> _Seen | None:
        waits = self._here.waits
        mark: object = waits
        if waits is None:
            place: Place | None = place_of(self._here.thread)  # 1
            if place is None or not place.communicates:
                return None
            mark = place.mark
        if accelerator_is_used():  # 4
            return None
        moved = traffic(self._store_port)  # 2, 4
        if moved is None or moved.under_way or others_work():  # 3
            return None
        return _Seen(time.monotonic(), mark, moved, others_processor_s())


def _still(before: _Seen, now: _Seen) -> bool:
    used_s = now.processor_s - before.processor_s
    return (
        before.mark == now.mark
        and before.traffic == now.traffic
        and used_s <= BUSY_SHARE * (now.at_s - before.at_s) + BURST_S
    )


def accelerator_is_used() -> bool:
    """Whether this process has begun to use an accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    asked = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    return asked is None or bool(asked())
