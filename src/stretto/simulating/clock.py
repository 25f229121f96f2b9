"""The clock of the simulation: events in time order, and moments that something can wait for.

Knows nothing of plans. Events at one time happen in the order in which they were put in, so that equal plans
give equal timelines; those that choose between what has come by then happen when all others have.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """A queue of events; `now_us` is the time of the event that is happening."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_us: float, event: Callable[[], None]) -> None:
        """Let `event` happen at `time_us`, which must not lie in the past."""
        heapq.heappush(self._events, (time_us, False, self._count, event))
        self._count += 1

    def choose(self, event: Callable[[], None]) -> None:
        """Let `event` happen now, when everything else that happens now has."""
        heapq.heappush(self._events, (self.now_us, True, self._count, event))
        self._count += 1

    def run(self) -> None:
        """Let events happen until none is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._events:
            return False
        self.now_us, _, _, event = heapq.heappop(self._events)
        event()
        return True

    def skip(self, time_us: float) -> bool:
        """Let it be `time_us`, if nothing happens until then; whether it is."""
        if self._events and self._events[0][0] <= time_us:
            return False
        self.now_us = time_us
        return True

    def advance(self, time_us: float) -> None:
        """Let the events up to `time_us` happen; then it is that time, or stays what it was if that is
        later. What is chosen at that time waits: something may come yet."""
        while self._events and self._events[0][:2] <= (time_us, False):
            self.step()
        self.now_us = max(self.now_us, time_us)


class Moment:
    """Something that happens once. `begun_us`: since when it has been under way (None: not yet)."""

    __slots__ = ("_waiters", "begun_us", "happened")

    def __init__(self) -> None:
        self.begun_us: float | None = None
        self.happened = False
        self._waiters: list[Callable[[], None]] = []

    def then(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the moment happens; it must not have happened yet."""
        assert not self.happened
        self._waiters.append(resume)

    def happen(self, clock: Clock) -> None:
        """Let the moment happen now; those who wait go on as events of this time."""
        self.happened = True
        for resume in self._waiters:
            clock.at(clock.now_us, resume)
        self._waiters.clear()
