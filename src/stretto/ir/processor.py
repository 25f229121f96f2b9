"""The plan file's section on processors that others share; absent on accelerators.

What is measured of them is in `stretto.processor`, as is what a clock and a bound make of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Processor:
    """A control group's quota on each rank: in every `period_us` a rank may compute for `share` of it, and is
    stopped for the rest. Op times are those of a rank that never waits for anything else.

    speed: what it has of a processor while that lasts, from `share` to 1: other ranks may compute on the same
        cores.
    skew: like `Costs.skew`, and beside it: how much longer the slowest of the ranks that share a place takes
        than they do on average because they are stopped at different times. Of ranks that never wait; one
        that has waited is stopped less.
    """

    period_us: float
    share: float
    speed: float = 1.0
    skew: float = 0.0

    def __post_init__(self) -> None:
        if not (self.period_us > 0.0 and 0.0 < self.share < 1.0 and self.share <= self.speed <= 1.0):
            raise ValueError(
                "a quota has a period above 0, a share above 0 and below 1, and a speed from its share to 1, "
                f"not {self.period_us} us, {self.share} and {self.speed}"
            )
        if not self.skew >= 0.0:
            raise ValueError(f"a quota's skew is a share, 0 or more, not {self.skew}")

    @property
    def fastest(self) -> float:
        """How many times as fast as its op times say a rank computes while the quota lasts."""
        return self.speed / self.share
