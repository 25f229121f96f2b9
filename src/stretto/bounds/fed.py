"""The most that a machine can have done by some moment, when another machine feeds it.

Numbers only: knows nothing of plans. A *feeder* does one thing at a time: the lane of an axis for the
compute lane, whose ops need collectives; compute for a lane, whose collectives need ops. The theorem:

1. A job of one microbatch *needs* x of the feeder's time: what the feeder must have done for the same
   microbatch (and in the same stage) before the job begins.
2. Before time a, only jobs with head < a begin. If the feeder has by then done X for one microbatch, then of
   that microbatch at most U(X) is done, the time of all jobs with head < a and x <= X: a staircase.
3. The feeder does nothing before its first work may begin, at `first`, and then one thing at a time: its X
   of all microbatches and stages add up to no more than a - first.
4. So at most the largest sum of U(X) over all X with that sum is done before a. For any price p >= 0 of the
   feeder's time it is at most

       p * (a - first) + microbatches * sum over stages of max over x of (U(x) - p * x).

   The least of these over p stands on the concave hull of U: it is m * hull((a - first) / m) for one stage.
5. The same holds backward from the end of the step, with tails for heads, the feeder's time that the job must
   precede for x, and the least tail of its work for `first`.

What makes work longer than its time (slowdown, other work on the feeder) only leaves less to be done.
Rounding x down, as many distinct ones are, keeps 2 true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

THRESHOLDS = 256
"""Distinct values tried of heads, of tails and of x, on each machine. With more, some are rounded down,
which keeps the bound true. Chosen so that 64 ranks take about a second."""

ROUNDING = 1e-12
"""Relative difference below which two bounds are equal: a few roundings of double precision."""

_CUTS = 64
"""Prices tried at most; each price gives a true bound, and the least is found after a few."""


@dataclass(frozen=True, slots=True)
class Feeder:
    """A machine that another one waits for, in microseconds.

    name: in words. head_us: before when it does nothing. tail_us: how long before the end it does no more.
    ahead_us: by how much what it does in any stretch of time may exceed it.
    """

    name: str
    head_us: float
    tail_us: float
    ahead_us: float = 0.0


def most_done(
    times_us: Array, at: Indices, each_us: Array, needs_us: Array, stages: Indices, room_us: Array, m: int
) -> Array:
    """Step 4, for many times a at once: the most that is done before each, of m microbatches. Microseconds.

    times_us: the times a, ascending. at[job]: the last of them that is not above the job's head. each_us,
    needs_us, stages: by job, its time a microbatch, its x, its stage. room_us: by a, a - first.
    """
    room_us = np.maximum(room_us, 0.0)
    staircases = [
        _staircase(len(times_us), at[here], each_us[here], needs_us[here])
        for here in (stages == stage for stage in np.unique(stages))
    ]

    def touch(rows: Indices, price: Array) -> tuple[Array, Array]:
        """Where the sum of U(x) - price * x is largest, in each row: (sum of U, sum of x)."""
        done, used = np.zeros(len(rows)), np.zeros(len(rows))
        for x_us, staircase in staircases:
            best = np.argmax(staircase[rows] - price[:, None] * x_us, axis=1)
            done += m * staircase[rows, best]
            used += m * x_us[best]
        return done, used

    # Two points of the hull, at or before the room and beyond it, close in on the edge above it.
    rows = np.arange(len(times_us))
    left_done: Array = m * np.sum([staircase[:, 0] for _, staircase in staircases], axis=0)
    left_used = np.zeros(len(rows))
    right_done, right_used = touch(rows, np.zeros(len(rows)))
    most: Array = right_done.copy()
    rows = rows[right_used > room_us]
    for _ in range(_CUTS):
        if not len(rows):
            break
        price = (right_done[rows] - left_done[rows]) / (right_used[rows] - left_used[rows])
        done, used = touch(rows, price)
        most[rows] = np.minimum(most[rows], done + price * (room_us[rows] - used))
        # Where nothing lies above the line through both points, it is the edge.
        above = done - price * used > (left_done[rows] - price * left_used[rows]) * (1 + ROUNDING)
        above &= (used > left_used[rows]) & (used < right_used[rows])
        rows, done, used = rows[above], done[above], used[above]
        left = used <= room_us[rows]
        left_done[rows[left]], left_used[rows[left]] = done[left], used[left]
        right_done[rows[~left]], right_used[rows[~left]] = done[~left], used[~left]
    return most


def thresholds(values: Array, more: Array | None = None, *, most: int = THRESHOLDS) -> tuple[Array, Indices]:
    """Values to try, ascending, and for each value the largest of them that is not above it. more: others
    that are tried as well; most: how many values, at most."""
    distinct = np.unique(values)
    if len(distinct) > most:
        distinct = distinct[np.linspace(0, len(distinct) - 1, most).astype(int)]
    if more is not None:
        # None below the least value, so that there is one for each.
        distinct = np.union1d(distinct, more[more > distinct[0]])
    return distinct, np.searchsorted(distinct, values, side="right") - 1


def evenly_of(values: Array, most: int) -> Array:
    """So many of the values, at most: those that follow points which lie evenly between the first and the
    last. Values that are a rounding apart give as many, as far apart."""
    ascending = np.sort(values)
    points = np.linspace(ascending[0], ascending[-1], most)
    return np.unique(ascending[np.searchsorted(ascending, points * (1 - ROUNDING))])


def sums_above(
    shape: tuple[int, int], at_head: Indices, at_tail: Indices, values: Sequence[float] | Array
) -> Array:
    """For each pair of thresholds, the sum over jobs whose head and tail are not below them. at_head,
    at_tail: by job, as `thresholds` gives them."""
    grid = np.zeros(shape)
    np.add.at(grid, (at_head, at_tail), values)
    found: Array = grid[::-1, ::-1].cumsum(0).cumsum(1)[::-1, ::-1]
    return found


def _staircase(count: int, at: Indices, each_us: Array, needs_us: Array) -> tuple[Array, Array]:
    """Step 2: (x, ascending from 0; U of each of `count` times a and each x), for the jobs of one stage."""
    x_us, at_x = thresholds(np.concatenate(([0.0], needs_us)))
    # A job counts for the times above its head: the ones after the last that is not.
    grid = np.zeros((count + 1, len(x_us)))
    np.add.at(grid, (at + 1, at_x[1:]), each_us)
    return x_us, grid[:-1].cumsum(0).cumsum(1)
