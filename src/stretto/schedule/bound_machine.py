"""The one-machine bound: how soon a machine that does one thing at a time can be done with its work.

Numbers only: knows nothing of plans. For any set S of the work on a machine, a step lasts at least the least
head in S, plus the time of S, plus the least tail in S. The sets tried are all {head >= a and tail >= b}.
This is the preemptive one-machine bound of Jackson's rule (Carlier, "The one-machine sequencing problem",
1982).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

THRESHOLDS = 256
"""Heads and tails tried on each machine. With more distinct ones, some are rounded down, which keeps the
bound true. Chosen so that 64 ranks take about a second."""

ROUNDING = 1e-12
"""Relative difference below which two bounds are equal: a few roundings of double precision."""


@dataclass(slots=True)
class Work:
    """What a machine has to do: jobs, each once a microbatch or once a step. Microseconds.

    outside_us, share: other work of `outside_us` that takes the machine from these jobs, at most `share` of
        its speed at any time; what of it cannot fit before the head and after the tail is added.
    before_us: time of the jobs that may lie before their head.
    """

    heads: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    each_us: list[float] = field(default_factory=list)
    once_us: list[float] = field(default_factory=list)
    outside_us: float = 0.0
    share: float = 0.0
    before_us: float = 0.0

    def add(self, head_us: float, tail_us: float, each_us: float = 0.0, once_us: float = 0.0) -> None:
        """One job."""
        self.heads.append(head_us)
        self.tails.append(tail_us)
        self.each_us.append(each_us)
        self.once_us.append(once_us)


@dataclass(frozen=True, slots=True)
class Machine:
    """The binding set: us = head + microbatches * each + once + extra + tail."""

    us: float
    head_us: float
    each_us: float
    once_us: float
    tail_us: float
    extra_us: float = 0.0


def one_machine(work: Work, microbatches: int) -> Machine | None:
    """The best of all sets; None for a machine with nothing to do."""
    if not work.heads:
        return None
    firsts, at_head = _thresholds(np.array(work.heads))
    lasts, at_tail = _thresholds(np.array(work.tails))

    def sums(values: list[float] | Array) -> Array:
        """For each pair of thresholds, the sum over jobs that lie in both."""
        grid = np.zeros((len(firsts), len(lasts)))
        np.add.at(grid, (at_head, at_tail), values)
        found: Array = grid[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
        return found

    each, once = sums(work.each_us), sums(work.once_us)
    filled = sums(np.ones(len(work.heads))) > 0
    around = firsts[:, None] + lasts[None, :]
    extra = np.maximum(0.0, work.outside_us - work.share * around)
    early = np.where(firsts[:, None] > 0, work.before_us, 0.0)
    total = np.where(filled, around + microbatches * each + once + extra - early, -np.inf)
    # Of equal sets the first, which is the largest, says best what binds.
    best = int(np.argmax(total >= total.max() * (1 - ROUNDING)))
    row, column = np.unravel_index(best, total.shape)
    return Machine(
        float(total[row, column]),
        float(firsts[row]),
        float(each[row, column]),
        float(once[row, column]),
        float(lasts[column]),
        float(extra[row, column]),
    )


def _thresholds(values: Array) -> tuple[Array, NDArray[np.intp]]:
    """Values to try, ascending, and for each value the largest of them that is not above it."""
    distinct = np.unique(values)
    if len(distinct) > THRESHOLDS:
        distinct = distinct[np.linspace(0, len(distinct) - 1, THRESHOLDS).astype(int)]
    return distinct, np.searchsorted(distinct, values, side="right") - 1
