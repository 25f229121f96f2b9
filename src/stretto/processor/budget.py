"""What a rank under a quota has of its processor, period by period: how fast its compute lane goes
(`simulating.compute_lane.Steady`), and the least time that work takes, by which bounds go.

1. In each period a rank has `share` of it in processor time. While some is left, its lane runs with `speed`
   of a processor, less what transfers take; then it is stopped until the next period. So a lane that waited
   for something else has time left, and computes faster.
2. Transfers take theirs whether or not the lane runs. What they take when nothing is left is a debt, which
   the next period pays. Time that is left over at the end of a period is lost.
3. Periods begin with the step, on all ranks: ranks that share a pipeline rank are stopped together. In truth
   each is stopped in its own time, which brings them apart (`behind_us`).

Full periods are summed in closed form: where transfers take nearly all that a rank has, work may go on for
millions of periods. A lane that works on, with `left` at the start of a period, runs for left / speed; in
what remains of the period, transfers run into debt by `taken` of it. So the next period begins with

    left' = share * period - (period - left / speed) * taken,

which is linear in `left`: a geometric series.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.ir.costs import Processor

DONE_US = 1e-6
"""Work, or time, of which no more than this is left is done: what sums of times in double precision may be
off by."""


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
        taken = load * self._share
        if now_us < self._until_us:
            return self._spend(now_us - since_us, taken, working) * self._speed(load)
        ran_us = self._spend(self._until_us - since_us, taken, working)
        self._left_us = min(0.0, self._left_us) + self._full_us
        periods = int((now_us - self._until_us) / self._period_us)
        if periods and working:
            in_them_us, self._left_us = self._work_on(self._left_us, periods, taken)
            ran_us += in_them_us
            self._busy_us += periods * self._period_us
            self._stopped_us += periods * self._period_us - in_them_us
        elif periods:
            # Each pays so much of a debt.
            paid_us = periods * (self._full_us - self._period_us * taken)
            self._left_us = min(self._full_us, self._left_us + paid_us)
        begun_us = self._until_us + periods * self._period_us
        self._until_us = begun_us + self._period_us
        ran_us += self._spend(max(0.0, now_us - begun_us), taken, working)
        return ran_us * self._speed(load)

    def end(self, now_us: float, work_us: float, load: float) -> float | None:
        """When work that goes on from now is done, if the load stays; None if never."""
        speed = self._speed(load)
        if speed <= 0.0:
            return None
        taken, need_us = load * self._share, work_us / speed
        rest_us = self._until_us - now_us
        runs_us = min(rest_us, max(0.0, self._left_us) / self._rate)
        if need_us <= runs_us:
            return now_us + need_us
        need_us -= runs_us
        left_us = self._left_us - runs_us * self._rate - (rest_us - runs_us) * taken
        left_us = min(0.0, left_us) + self._full_us
        periods = self._before(left_us, need_us, taken)
        if periods is None:
            return None
        ran_us, _ = self._work_on(left_us, periods, taken)
        return self._until_us + periods * self._period_us + need_us - ran_us

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

    def _work_on(self, left_us: float, periods: int, taken: float) -> tuple[float, float]:
        """For how long a lane that works runs in so many periods, of which the first begins with `left_us`;
        and with what the one behind them begins."""
        ratio, steady_us = self._course(taken)
        if ratio >= 1.0:  # It has no more than its share, and transfers take all of that.
            return periods * left_us / self._rate, left_us
        kept = ratio**periods
        off_us = left_us - steady_us
        spent_us = periods * steady_us + off_us * (1.0 - kept) / (1.0 - ratio)
        return spent_us / self._rate, steady_us + off_us * kept

    def _before(self, left_us: float, need_us: float, taken: float) -> int | None:
        """In how many full periods, of which the first begins with `left_us`, a lane that has to run for
        `need_us` is not yet done; None if it never is. The lane must have a speed."""
        ratio, steady_us = self._course(taken)
        at_first_us = (left_us - steady_us) / (1.0 - ratio)  # more than steady periods, over all of them
        if steady_us > DONE_US:
            periods = max(0, int((need_us * self._rate - at_first_us) / steady_us))
        elif need_us * self._rate < at_first_us - DONE_US:
            periods = 0
        else:
            return None  # transfers take all that there is
        while periods and self._work_on(left_us, periods, taken)[0] >= need_us:
            periods -= 1
        while self._work_on(left_us, periods + 1, taken)[0] < need_us:
            periods += 1
        return periods

    def _course(self, taken: float) -> tuple[float, float]:
        """While the lane works on: which part of a period's difference to the steady state is left in the
        next; and what periods begin with in the steady state."""
        ratio = taken / self._rate
        if ratio >= 1.0:
            return ratio, 0.0
        return ratio, (self._full_us - self._period_us * taken) / (1.0 - ratio)

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
