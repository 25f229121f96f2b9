"""A compute lane: one piece of work at a time, at the speed that transfers leave it.

Knows the clock; nothing of ops or windows. The contract:

1. While transfers take shares of its rank's processor, it goes slower by these shares (at least 0 is left);
   a lane that is idle loses nothing.
2. Work is counted in the time that it takes a lane that never waits. A lane does as much of it in any time as
   its `Speed` says. On an accelerator that is `Steady`; on a processor under a quota it is
   `stretto.processor.budget`, the one place where the simulation meets what only processors do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stretto.ir.costs import Costs
from stretto.processor.budget import DONE_US, Budget
from stretto.simulating.clock import Clock


class Speed(Protocol):
    """How much work a lane does. load: the share that transfers take of a lane that never waits."""

    def run(self, since_us: float, now_us: float, load: float, working: bool) -> float:
        """A stretch of time has passed since the last call; returns the work that was done in it."""

    def end(self, now_us: float, work_us: float, load: float) -> float | None:
        """When work that goes on from now is done, if the load stays; None if never."""

    def behind_us(self) -> float:
        """By how much more the slowest rank of the place is behind than `Costs.skew` of the work says, for
        what was done since the last call."""


class Steady:
    """A microsecond's work in a microsecond, less what transfers take."""

    def run(self, since_us: float, now_us: float, load: float, working: bool) -> float:
        return (now_us - since_us) * (1.0 - load) if working else 0.0

    def end(self, now_us: float, work_us: float, load: float) -> float | None:
        return now_us + work_us / (1.0 - load) if load < 1.0 else None

    def behind_us(self) -> float:
        return 0.0


class ComputeLane:
    """One rank's. `working`: whether there is work that has not ended."""

    def __init__(self, clock: Clock, costs: Costs) -> None:
        self._clock = clock
        self.working = False
        self._left_us = self._since_us = 0.0
        self._loads: list[float] = []
        self._load = 0.0
        """What the loads take together, as a share."""
        self._version = 0
        self._then: Callable[[], None] = lambda: None
        self._speed: Speed = Steady() if costs.processor is None else Budget(costs.processor)

    def work(self, work_us: float, then: Callable[[], None]) -> None:
        """Work from now on; `then` is called at its end. The lane must not be working."""
        assert not self.working
        self._pass()
        self.working, self._left_us, self._then = True, work_us, then
        self._aim()

    def change_load(self, was: float, load: float) -> None:
        """A transfer that took the share `was` of the processor takes `load` from now on."""
        self._pass()
        if was:
            self._loads.remove(was)
        if load:
            self._loads.append(load)
        self._load = min(1.0, sum(self._loads))
        if self.working:
            self._aim()

    def behind_us(self) -> float:
        """As `Speed.behind_us`. While the lane does not work."""
        return self._speed.behind_us()

    def _pass(self) -> None:
        """Account for the time since the last change."""
        since_us, now_us = self._since_us, self._clock.now_us
        self._since_us = now_us
        self._left_us -= self._speed.run(since_us, now_us, self._load, self.working)

    def _aim(self) -> None:
        """Put the end of the work into the clock; an earlier aim no longer counts."""
        self._version += 1
        version, now_us = self._version, self._clock.now_us
        # Work that ends as a transfer begins has ended, whichever of the two the clock tells first.
        end_us: float | None = now_us
        if self._left_us > DONE_US:
            end_us = self._speed.end(now_us, self._left_us, self._load)
        if end_us is not None:  # else nothing is left for it until a transfer ends
            self._clock.at(end_us, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version == self._version and self.working:
            self._pass()
            self.working = False
            self._then()
