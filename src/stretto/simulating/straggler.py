"""How far the slowest rank of a place is behind: the ranks of a place are walked as one.

Each stretch of work puts the slowest rank further behind, by `Costs.skew` of it. At a wait for a collective
the others wait for it, less what the collective has been done for; then it is behind by that.
Knows nothing of ops or clocks: simulation, windows by themselves and steps of one window a rank all use it.
"""

from __future__ import annotations


class Straggler:
    """By how much the slowest rank of one place is behind."""

    __slots__ = ("_behind_us", "_skew")

    def __init__(self, skew: float) -> None:
        self._skew = skew
        self._behind_us = 0.0

    def work(self, work_us: float, behind_us: float = 0.0) -> None:
        """The place has worked for so long. behind_us: what brings the slowest rank behind beside that."""
        self._behind_us += self._skew * work_us + behind_us

    def late_us(self, slack_us: float) -> float:
        """How long a wait would be for the slowest rank. slack_us: since when the collective is done."""
        return max(0.0, self._behind_us - slack_us)

    def meet(self, slack_us: float) -> float:
        """The ranks wait for such a collective; how long they do so for the slowest."""
        late_us = self.late_us(slack_us)
        self._behind_us = min(self._behind_us, slack_us)
        return late_us
