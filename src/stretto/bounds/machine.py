"""The one-machine bound: how soon a machine that does one thing at a time can be done with its work.

Numbers only: this file knows nothing of plans. For any set S of the work on a machine, a step lasts at least
the least head in S, plus the time of S, plus the least tail in S. The sets tried are all
{head >= a and tail >= b}. This is the preemptive one-machine bound of Jackson's rule (Carlier, "The
one-machine sequencing problem", 1982).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.bounds.stage import Array

Indices = NDArray[np.intp]

THRESHOLDS = 256
"""Distinct values of a, and of b, that are tried on each machine. With more heads or tails, some are rounded
down, which keeps the bound true. Assumed; 64 ranks then take about a second."""

ROUNDING = 1e-12
"""Relative difference below which two bounds are equal: a few roundings of double precision."""


@dataclass(frozen=True, slots=True)
class OtherWork:
    """What takes a machine from its jobs: `us` in all, at most `share` of the machine's speed at any time,
    nothing before `head_us` or in the last `tail_us` of the step."""

    us: float
    share: float
    head_us: float = 0.0
    tail_us: float = 0.0

    def inside_us(self, firsts: Array, lasts: Array) -> Array:
        """For each pair of (first, last): the least of it between `first` and `last` before the end."""
        before = np.maximum(0.0, firsts - self.head_us)[:, None]
        behind = np.maximum(0.0, lasts - self.tail_us)[None, :]
        inside: Array = np.maximum(0.0, self.us - self.share * (before + behind))
        return inside


@dataclass(slots=True)
class MachineWork:
    """What a machine has to do: jobs, each once a microbatch or once a step. Microseconds.

    other: work of which what cannot fit before the head and after the tail is added; its shares are at most 1
        together.
    before_us: time of the jobs that may be before their head.
    ahead_us: by how much the jobs that are done in any stretch of time may exceed it.
    """

    heads: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    each_us: list[float] = field(default_factory=list)
    once_us: list[float] = field(default_factory=list)
    other: tuple[OtherWork, ...] = ()
    before_us: float = 0.0
    ahead_us: float = 0.0

    def add(self, head_us: float, tail_us: float, each_us: float = 0.0, once_us: float = 0.0) -> None:
        """Add one job."""
        self.heads.append(head_us)
        self.tails.append(tail_us)
        self.each_us.append(each_us)
        self.once_us.append(once_us)


@dataclass(frozen=True, slots=True)
class MachineBound:
    """The binding set: us = head + microbatches * each + once + extra + tail, less what may be done before
    the head or ahead of time."""

    us: float
    head_us: float
    each_us: float
    once_us: float
    tail_us: float
    extra_us: float = 0.0


def one_machine(work: MachineWork, microbatches: int) -> MachineBound | None:
    """The largest bound of all sets; None for a machine with nothing to do."""
    if not work.heads:
        return None
    firsts, at_head = _thresholds(np.array(work.heads))
    lasts, at_tail = _thresholds(np.array(work.tails))

    def sums(values: Sequence[float]) -> Array:
        """For each pair of thresholds, the sum over jobs whose head and tail are not below them."""
        grid = np.zeros((len(firsts), len(lasts)))
        np.add.at(grid, (at_head, at_tail), values)
        total: Array = grid[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
        return total

    each, once = sums(work.each_us), sums(work.once_us)
    extra = np.zeros_like(each)
    for other in work.other:
        extra += other.inside_us(firsts, lasts)
    early = work.ahead_us + np.where(firsts[:, None] > 0, work.before_us, 0.0)
    total = firsts[:, None] + lasts[None, :] + microbatches * each + once + extra - early
    total[sums([1.0] * len(work.heads)) == 0] = -np.inf
    # Of equal sets the first, which is the largest, describes best what binds.
    best = int(np.argmax(total >= total.max() * (1 - ROUNDING)))
    row, column = np.unravel_index(best, total.shape)
    return MachineBound(
        float(total[row, column]),
        float(firsts[row]),
        float(each[row, column]),
        float(once[row, column]),
        float(lasts[column]),
        float(extra[row, column]),
    )


def _thresholds(values: Array) -> tuple[Array, Indices]:
    """Values to try, ascending, and for each value the largest of them that is not above it."""
    distinct = np.unique(values)
    if len(distinct) > THRESHOLDS:
        distinct = distinct[np.linspace(0, len(distinct) - 1, THRESHOLDS).astype(int)]
    return distinct, np.searchsorted(distinct, values, side="right") - 1
