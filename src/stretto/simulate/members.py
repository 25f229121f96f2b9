"""The ranks of a place in a simulated step: they do equal work, one of them is walked, and the others are
ahead of it or behind.

Knows nothing of ops or lanes; the walk asks when ranks work and where they meet. Two ways to say it:

`Smooth`  no rank is told from another: the slowest comes behind evenly (`stretto.simulate.straggler`), and
          a wait stands for it. What plans are made with, since an order is not to be fitted to one chance.
`Members` every rank is fast for a while and slow for a while (`Costs.unsteady`):
    1. The first rank is walked, and does its work at the speeds that it has meanwhile.
    2. The others do the same work at speeds of their own. What `Costs.skew` says beyond what such speeds
       bring lasts: one rank is slower by it all the time. Where a quota stops ranks, it stops one of the
       others before the first or after it, as often as `Quota.skew` says.
    3. A collective of an axis is between ranks that differ in nothing else: it is ready when the last of the
       group is (`last`). At a wait each rank goes on when it has come and what it waits for is there.
    A lane that has work for a while does not notice a slow rank, and one that has none stands for it. So a
    step loses more than it would at one speed of the same mean, most of all where compute and network take
    equally long; `Smooth` does not see that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from random import Random
from statistics import NormalDist

from stretto.ir.costs import Costs
from stretto.simulate.straggler import Straggler

MOST_MEMBERS = 16
"""Ranks of a place that are told apart; of more, the last is hardly later. Assumed."""

LEAST = 0.25
"""No rank is ever slower than at this part of its mean speed. Assumed."""

Behind = Sequence[float]
"""By how much each rank is later than the first."""


class Smooth:
    """See above. Its ranks start collectives and messages together."""

    __slots__ = ("_straggler",)

    behind: Behind = ()

    def __init__(self, costs: Costs) -> None:
        self._straggler = Straggler(costs.skew, costs.quota_skew)

    def last(self, axes: Sequence[str] | None = None) -> Behind:
        """For each rank, by how much the last of those with which it has collectives of these axes (of all,
        by default) is later than the first rank; empty of ranks that are not told apart."""
        return ()

    def work(self, now_us: float, work_us: float) -> float:
        """From now on, the ranks do so much work: how long it takes the first."""
        self._straggler.work(work_us)
        return work_us

    def stop(self, work_us: float) -> None:
        """A quota has stopped the place as it stops so much work of ranks that never stand."""
        self._straggler.stop(work_us)

    def late_us(self, slack_us: float) -> float:
        """How long the first rank stands for the last at a wait for a collective that has been done for so
        long."""
        return self._straggler.meet(slack_us)

    def meet(self, came_us: float, there_us: float, sent_behind: Behind = ()) -> None:
        """The first rank came to a wait, and what it waits for was there at `there_us`; for each of the
        others later by `sent_behind`, if that is given."""


class Spells:
    """A deviation over time: a number that holds for a while, and then another. spread: their standard
    deviation, around `mean`; of minus that, the mirror image."""

    __slots__ = ("_draw", "_ends_us", "_mean", "_spell_us", "_spread", "_values")

    def __init__(self, spread: float, spell_us: float, draw: Random, mean: float = 0.0) -> None:
        self._mean = mean
        self._spread = spread
        self._spell_us = spell_us
        self._draw = draw
        self._ends_us: list[float] = []
        self._values: list[float] = []

    def at(self, time_us: float) -> tuple[float, float]:
        """(what holds at this time, until when)."""
        while not self._ends_us or self._ends_us[-1] <= time_us:
            begin_us = self._ends_us[-1] if self._ends_us else 0.0
            self._ends_us.append(begin_us + self._draw.expovariate(1.0 / self._spell_us))
            self._values.append(self._mean + self._draw.gauss(0.0, self._spread))
        at = bisect_right(self._ends_us, time_us)
        return self._values[at], self._ends_us[at]


class Members:
    """See above. axes: of the job, with their sizes; spread: of the ranks' own deviations, or minus that;
    shared: what all ranks of the step have together; draw: where chance comes from."""

    __slots__ = (
        "_axes",
        "_behind",
        "_draw",
        "_groups",
        "_own",
        "_shared",
        "_stops_apart_us",
        "_stops_in_us",
        "_stops_us",
    )

    def __init__(
        self,
        axes: Sequence[tuple[str, int]],
        costs: Costs,
        spread: float,
        spell_us: float,
        shared: Spells,
        draw: Random,
    ) -> None:
        self._axes = axes
        self._draw = draw
        self._stops_us, self._stops_apart_us = 0.0, math.inf
        quota, count = costs.quota, min(math.prod(size for _, size in axes), MOST_MEMBERS)
        # A quota that leaves a rank no more than it takes anyway stops nobody.
        if quota is not None and quota.skew and quota.fastest > 1.0 and count > 1:
            self._stops_us = quota.period_us * (1.0 - 1.0 / quota.fastest)
            # Of two ranks, one that is later by a stop is later than their mean by half of it.
            self._stops_apart_us = 0.5 * self._stops_us / quota.skew
        self._stops_in_us = self._next_us()
        self._behind = [0.0] * count
        self._shared = shared
        means = _lasting(count, costs.skew, abs(spread))
        # In a mirror image the slowest rank is at the other end, so that none is the slowest in the mean.
        means = means if math.copysign(1.0, spread) < 0.0 else means[::-1]
        self._own = [Spells(spread, spell_us, Random(draw.random()), mean) for mean in means]
        self._groups: dict[tuple[str, ...] | None, list[list[int]]] = {None: [list(range(count))]}

    @property
    def behind(self) -> Behind:
        return tuple(self._behind)

    def last(self, axes: Sequence[str] | None = None) -> Behind:
        """As `Smooth.last`; step 3."""
        key = None if axes is None else tuple(axes)
        if key not in self._groups:
            self._groups[key] = _groups(len(self._behind), self._axes, axes or ())
        found = list(self._behind)
        for group in self._groups[key]:
            last_us = max(self._behind[member] for member in group)
            for member in group:
                found[member] = last_us
        return found

    def work(self, now_us: float, work_us: float) -> float:
        """Steps 1 and 2."""
        ends = [
            self._end_us(own, now_us + behind, work_us)
            for own, behind in zip(self._own, self._behind, strict=True)
        ]
        self._behind = [end_us - ends[0] for end_us in ends]
        return ends[0] - now_us

    def _end_us(self, own: Spells, now_us: float, work_us: float) -> float:
        """When a rank has done work that it begins now."""
        while True:
            mine, mine_until_us = own.at(now_us)
            ours, ours_until_us = self._shared.at(now_us)
            speed = max(LEAST, 1.0 + mine + ours)
            until_us = min(mine_until_us, ours_until_us)
            if now_us + work_us / speed <= until_us:
                return now_us + work_us / speed
            work_us -= (until_us - now_us) * speed
            now_us = until_us

    def stop(self, work_us: float) -> None:
        """As `Smooth.stop`; step 2."""
        self._stops_in_us -= work_us
        while self._stops_in_us <= 0.0:
            member = self._draw.randrange(1, len(self._behind))
            self._behind[member] += self._draw.choice((-1.0, 1.0)) * self._stops_us
            self._stops_in_us += self._next_us()

    def _next_us(self) -> float:
        """What is stopped until ranks are stopped apart."""
        mean_us = self._stops_apart_us
        return self._draw.expovariate(1.0 / mean_us) if mean_us < math.inf else math.inf

    def late_us(self, slack_us: float) -> float:
        """As `Smooth.late_us`: that the last was later with its part is in when the collective was done."""
        return 0.0

    def meet(self, came_us: float, there_us: float, sent_behind: Behind = ()) -> None:
        """Step 3, as `Smooth.meet`."""
        left_us = max(came_us, there_us)
        pairs = zip(self._behind, sent_behind or [0.0] * len(self._behind), strict=True)
        self._behind = [max(came_us + behind, there_us + sent) - left_us for behind, sent in pairs]


def _lasting(count: int, skew: float, spread: float) -> list[float]:
    """Step 2: how much faster than their mean the ranks of a place are for good, the slowest first.

    Of ranks whose speeds deviate by `spread`, the slowest is behind by so much at any time: Blom's
    approximation of a normal order statistic (Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    if count < 2:
        return [0.0] * count
    brought = spread * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    lasting = max(0.0, skew - brought)
    return [-lasting, *[lasting / (count - 1)] * (count - 1)]


def _groups(count: int, axes: Sequence[tuple[str, int]], joined: Sequence[str]) -> list[list[int]]:
    """The first `count` ranks of a place in groups whose coordinates differ in the joined axes only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for member in range(count):
        rest, apart = member, []
        for name, size in reversed(axes):
            rest, at = divmod(rest, size)
            if name not in joined:
                apart.append(at)
        groups.setdefault(tuple(apart), []).append(member)
    return list(groups.values())
