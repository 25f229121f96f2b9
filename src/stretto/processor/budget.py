"""What a rank under a quota has of its processor, period by period: how fast its compute lane goes
(`simulating.compute_lane.Steady`), and the least time that work takes, by which bounds go.

1. In each period a rank has `share` of it in processor time. While some is left, its lane runs with `speed`
   of a processor, less what transfers take; then it is stopped until the next period. So a lane that waited
   for something else has time left, and computes faster.
2. Transfers take theirs whether or not the lane runs. What they take when nothing is left is a debt, which
   the next period pays. Time that is left over at the end of a period is lost.
3. Periods begin with the step, on all ranks: ranks that share a pipeline rank are stopped together. In truth
   each is stopped in its own time, which brings them apart (`behind_us`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.ir.costs import Processor

DONE_US = 1e-6
"""Work, or time, of which no more than this is left is done: what sums of times in double precision may be
off by."""

MOST_PERIODS = 1_000_000
"""Work that goes on for more of them, which are hours, is as good as stopped: until the load changes."""


class Budget:
    """The processor time of the period in which `run` was last called. Below 0 it is a debt."""

    def __init__(self, processor: Processor) -> None:
        self._period_us, self._skew = processor.period_us, processor.skew
        self._share, self._rate = processor.share, processor.speed
        self._full_us = processor.period_us * processor.share
        self._left_us = self._full_us
        self._until_us = processor.period_us
        self._stopped_us = self._busy_us = 0.0
        """Of lanes that had work, since the last `behind_us`: how long they were stopped, and in all."""

    def run(self, since_us: float, now_us: float, load: float, working: bool) -> float:
        """Spend the time of a stretch; returns the work that was done in it.

        since_us: where the last stretch ended. load: what transfers take, of what a lane has that never
        waits. Work is counted in the time that it takes such a lane.
        """
        taken, ran_us = load * self._share, 0.0
        while now_us >= self._until_us:
            ran_us += self._spend(self._until_us - since_us, taken, working)
            self._left_us = min(0.0, self._left_us) + self._full_us
            since_us, self._until_us = self._until_us, self._until_us + self._period_us
        ran_us += self._spend(now_us - since_us, taken, working)
        return ran_us * self._speed(load)

    def end(self, now_us: float, work_us: float, load: float) -> float | None:
        """When work that goes on from now is done, if the load stays; None if never."""
        speed = self._speed(load)
        if speed <= 0.0:
            return None
        taken, need_us = load * self._share, work_us / speed
        left_us, until_us = self._left_us, self._until_us
        for _ in range(MOST_PERIODS):
            runs_us = min(until_us - now_us, max(0.0, left_us) / self._rate)
            if need_us <= runs_us:
                return now_us + need_us
            need_us -= runs_us
            left_us -= runs_us * self._rate + (until_us - now_us - runs_us) * taken
            left_us = min(0.0, left_us) + self._full_us
            now_us, until_us = until_us, until_us + self._period_us
            if left_us <= DONE_US and self._full_us <= taken * self._period_us:
                return None  # transfers take all that there is
        return None

    def behind_us(self) -> float:
        """What the quota's stops since the last call bring the slowest rank of a pipeline rank behind: its
        skew of as much work as they are usual for. Where a lane that never waits is never stopped (it shares
        its core and is no faster for having waited), all work counts."""
        stopped_us, busy_us = self._stopped_us, self._busy_us
        self._stopped_us = self._busy_us = 0.0
        usual = 1.0 - self._share / self._rate
        return self._skew * (min(busy_us, stopped_us / usual) if usual > 0.0 else busy_us)

    def _spend(self, stretch_us: float, taken: float, working: bool) -> float:
        """Spend the time of a stretch within one period; returns for how long the lane ran."""
        ran_us = min(stretch_us, max(0.0, self._left_us) / self._rate) if working else 0.0
        self._left_us -= ran_us * self._rate + (stretch_us - ran_us) * taken
        if working:
            self._busy_us += stretch_us
            self._stopped_us += stretch_us - ran_us
        return ran_us

    def _speed(self, load: float) -> float:
        return (self._rate - load * self._share) / self._share


Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pace:
    """How much of its ops' times a compute lane may do in any stretch of time T, in microseconds: at most
    `fastest` times T, and at most T + `ahead_us`."""

    fastest: float = 1.0
    ahead_us: float = 0.0

    @staticmethod
    def of(processor: Processor | None) -> Pace:
        """That of a plan's ranks; steady on accelerators."""
        if processor is None:
            return STEADY
        return Pace(processor.fastest, 2.0 * (1.0 - processor.share) * processor.period_us)

    def least_us(self, work_us: Array) -> Array:
        """The least time in which so much is done. Superadditive, and grows no faster than the work: of a
        stretch that is known to take so long, the time of one of its ops may be taken off."""
        return np.maximum(work_us / self.fastest, work_us - self.ahead_us)


STEADY = Pace()
"""A lane that does a microsecond's work in a microsecond, always."""
