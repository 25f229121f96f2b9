"""What a rank under a quota has of its processor, period by period.

Knows neither clock nor lane. The contract:

1. In each period a rank has `share` of it in processor time. While some is left, its lane runs with `speed`
   of a processor, less what transfers take; then it stands until the next period.
2. Transfers take theirs whether or not the lane runs. What they take when nothing is left is a debt, which
   the next period pays. Time that is left over at the end of a period is lost.

Periods are walked one by one: they are as long as a few ops, so a closed form over many of them was tried
and made no walk faster.
"""

from __future__ import annotations

import math

from stretto.ir.costs import Quota

DONE_US = 1e-6
"""Work, or time, of which no more than this is left is done: what sums of times in double precision may be
off by."""


class Budget:
    """The processor time of the period in which `run` was last called. Below 0 it is a debt."""

    def __init__(self, quota: Quota) -> None:
        self._period_us = quota.period_us
        self._share, self._rate = quota.share, quota.speed
        self._whole_us = quota.period_us * quota.share
        self._left_us = self._whole_us
        self._until_us = quota.period_us
        self._stopped_us = self._busy_us = 0.0
        """Of lanes that had work, since the last `stopped_work`: how long they were stopped, and in all."""

    def run(self, since_us: float, now_us: float, load: float, working: bool) -> float:
        """Spend the time of a stretch; returns the work that was done in it.

        since_us: where the last stretch ended. load: what transfers take, of what a lane has that never
        stands. Work is counted in the time that it takes such a lane.
        """
        taken = load * self._share
        stretch_us = now_us - since_us
        ran_us = 0.0
        while since_us < now_us:
            end_us = min(now_us, self._until_us)
            in_it_us = end_us - since_us
            mine_us = min(in_it_us, max(0.0, self._left_us) / self._rate) if working else 0.0
            ran_us += mine_us
            self._left_us -= mine_us * self._rate + (in_it_us - mine_us) * taken
            if end_us >= self._until_us:
                self._left_us = min(0.0, self._left_us) + self._whole_us
                self._until_us += self._period_us
                if not working and not taken and self._left_us >= self._whole_us:
                    # Nothing is spent for a while, and nothing is left over from one period to another.
                    idle = max(0, math.ceil((now_us - self._until_us) / self._period_us))
                    self._until_us += idle * self._period_us
                    end_us = now_us if idle else end_us
            since_us = end_us
        if working:
            self._busy_us += stretch_us
            self._stopped_us += stretch_us - ran_us
        return ran_us * self._speed(load)

    def end(self, now_us: float, work_us: float, load: float) -> float | None:
        """When work that goes on from now is done, if the load stays; None if never."""
        if self._speed(load) <= 0.0:
            return None
        taken, need_us = load * self._share, work_us / self._speed(load)
        left_us, until_us = self._left_us, self._until_us
        while True:
            room_us = min(until_us - now_us, max(0.0, left_us) / self._rate)
            if need_us <= room_us:
                return now_us + need_us
            before_us, need_us = left_us, need_us - room_us
            stands_us = until_us - now_us - room_us
            left_us = min(0.0, left_us - room_us * self._rate - stands_us * taken) + self._whole_us
            if left_us <= DONE_US and left_us <= before_us:
                return None  # transfers take all that there is, but for what sums are off by
            now_us, until_us = until_us, until_us + self._period_us

    def stopped_work(self) -> float:
        """How the quota has stopped work since the last call: as it stops so much work of a lane that never
        stands. Where such a lane is never stopped (it shares its core and is no faster for having stood), all
        work counts."""
        stopped_us, busy_us = self._stopped_us, self._busy_us
        self._stopped_us = self._busy_us = 0.0
        usual = 1.0 - self._share / self._rate
        return min(busy_us, stopped_us / usual) if usual > 0.0 else busy_us

    def _speed(self, load: float) -> float:
        """Of work, while there is time left."""
        return (self._rate - load * self._share) / self._share
