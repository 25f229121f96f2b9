"""A compute lane: one piece of work at a time, at the speed that transfers and a quota leave it.

Knows the clock; nothing of ops or windows. The contract:

1. While transfers take shares of its rank's processor, it goes slower by these shares (at least 0 is left);
   a lane that stands loses nothing.
2. Work is counted in the time that it takes a lane that never stands. Under a quota such a lane has `share`
   of a processor: it has `speed` of one until the period's time is spent, and then stands until the next
   period. So a lane that stood for something else has time left, and computes faster. What transfers take is
   spent as well, whether or not there is work.
3. Periods begin with the step, on all ranks alike: ranks that share a place go on together, and stand
   together when one of them has nothing left.
4. What follows a wait takes longer, by up to `cold`: others have used the caches meanwhile, or the processor
   has gone to sleep. How long the lane stood counts over about the last `MEMORY_US`; work
   warms them again, by as much whether it comes in one piece or in many.
5. A part of what transfers take is that ops are slower, because they find the caches changed. What follows a
   wait finds them changed once: the larger of the two counts. Measured in steps of two ranks at 200 Mbit/s,
   whose ops and calls take 404 ms alone: with what was measured apart after waits (23 % longer) and beside
   collectives, of which half to two thirds are slower ops, they would take 561 ms; in steps they took 487.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from stretto.ir.costs import Quota
from stretto.simulate.budget import DONE_US, Budget
from stretto.simulate.clock import Clock

MEMORY_US = 200_000.0
"""Over how long a lane's standing still tells: it counts exponentially less. Assumed: products that followed
a wait were seen to be slower for 75 ms at least."""


class Load(NamedTuple):
    """What a transfer takes of a compute lane's speed, as shares: in all, and by making ops slower."""

    share: float
    slower: float = 0.0


NO_LOAD = Load(0.0)


class ComputeLane:
    """One rank's. `working`: whether there is work that has not ended."""

    def __init__(self, clock: Clock, quota: Quota | None = None, cold: float = 0.0) -> None:
        self._clock = clock
        self.working = False
        self._cold = cold
        self._stood = self._stood_at_us = 0.0
        self._left_us = self._since_us = 0.0
        self._loads: list[Load] = []
        self._taken = self._slower = 0.0
        """What the loads take together, as shares."""
        self._warming = 0.0
        """The part of the work under way that is there because the lane had stood."""
        self._version = 0
        self._then: Callable[[], None] = lambda: None
        self._budget = Budget(quota) if quota is not None else None

    def work(self, work_us: float, then: Callable[[], None]) -> None:
        """Work from now on; `then` is called at its end. The lane must not be working."""
        assert not self.working
        self._pass()
        if self._cold:
            self._count_stood()
            warmed = -math.expm1(-work_us / MEMORY_US)
            warming_us = self._cold * self._stood * warmed * MEMORY_US
            self._stood *= 1.0 - warmed
            work_us += warming_us
            self._warming = warming_us / work_us if warming_us else 0.0
        self.working, self._left_us, self._then = True, work_us, then
        self._aim()

    def change_load(self, was: Load, load: Load) -> None:
        """A transfer that took `was` of the processor takes `load` from now on."""
        self._pass()
        if was.share:
            self._loads.remove(was)
        if load.share:
            self._loads.append(load)
        self._taken = min(1.0, sum(load.share for load in self._loads))
        self._slower = sum(load.slower for load in self._loads)
        if self.working:
            self._aim()

    def stopped_work(self) -> float:
        """As `Budget.stopped_work`; 0 without a quota. While the lane does not work."""
        return self._budget.stopped_work() if self._budget is not None else 0.0

    @property
    def _load(self) -> float:
        """What transfers take of the speed at which the work goes on, with what is there for having stood."""
        load = self._taken
        if not self._warming or not self.working:
            return load
        # Step 5. Where slower ops are more, the work itself goes on at 1 - load; where its having stood is,
        # at 1 - warming of what the threads of transports leave.
        return max(load - self._slower, 1.0 - (1.0 - load) / (1.0 - self._warming))

    def _pass(self) -> None:
        """Account for the time since the last change."""
        since_us, now_us = self._since_us, self._clock.now_us
        self._since_us = now_us
        if self._budget is not None:
            self._left_us -= self._budget.run(since_us, now_us, self._load, self.working)
        elif self.working:
            self._left_us -= (now_us - since_us) * (1.0 - self._load)

    def _aim(self) -> None:
        """Put the end of the work into the clock; an earlier aim no longer counts."""
        self._version += 1
        version, now_us, load = self._version, self._clock.now_us, self._load
        # Work that ends as a transfer begins has ended, whichever of the two the clock tells first.
        end_us: float | None = now_us
        if self._left_us > DONE_US:
            if self._budget is not None:
                end_us = self._budget.end(now_us, self._left_us, load)
            else:
                end_us = now_us + self._left_us / (1.0 - load) if load < 1.0 else None
        if end_us is not None:  # else nothing is left for it until a transfer ends
            self._clock.at(end_us, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version == self._version and self.working:
            self._pass()
            self.working = False
            self._stood_at_us = self._clock.now_us
            self._then()

    def _count_stood(self) -> None:
        """Step 4: the lane has stood since its last work ended."""
        kept = math.exp((self._stood_at_us - self._clock.now_us) / MEMORY_US)
        self._stood = 1.0 + (self._stood - 1.0) * kept
