"""How far the ranks of a place come apart: they are walked as one, and the slowest of them is behind.

Each stretch of work puts the slowest rank further behind, by `Costs.skew` of it; where a quota stops ranks,
which it does for each in its own time, also by `Quota.skew` of what it has stopped. At a wait for a
collective the others stand until it is there, less what the collective has been done for; then they are apart
by that.
Knows nothing of ops or clocks: simulation, windows by themselves and steps of one window a rank all use it.
"""

from __future__ import annotations


class Straggler:
    """By how much the slowest rank of one place is behind."""

    __slots__ = ("_behind_us", "_quota_skew", "_skew")

    def __init__(self, skew: float, quota_skew: float = 0.0) -> None:
        self._skew = skew
        self._quota_skew = quota_skew
        self._behind_us = 0.0

    def work(self, work_us: float) -> None:
        """The place has worked for so long."""
        self._behind_us += self._skew * work_us

    def stop(self, work_us: float) -> None:
        """A quota has stopped the place as it stops so much work of ranks that never stand."""
        self._behind_us += self._quota_skew * work_us

    def late_us(self, slack_us: float) -> float:
        """How long a wait would stand for the slowest rank. slack_us: since when the collective is done."""
        return max(0.0, self._behind_us - slack_us)

    def meet(self, slack_us: float) -> float:
        """The ranks wait for such a collective; how long they stand."""
        late_us = self.late_us(slack_us)
        self._behind_us = min(self._behind_us, slack_us)
        return late_us
