"""The least time that work takes on a compute lane, whatever came before it: what bounds go by.

Under a quota a rank that has waited has time left, and computes faster for a while: at full speed while that
lasts, and in any stretch of time no more than that time's share and what is left of two periods'.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.ir.costs import Processor

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
