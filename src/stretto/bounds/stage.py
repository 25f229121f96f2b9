"""Distances inside one stage: what must pass between any two points of one microbatch, whatever the order.

Knows ops as numbers, with times and lanes; nothing of ranks, links or other stages. The contract:

1. An op *needs* what it reads, and what that needs; an op of I or W needs all of F, which is an action
   that comes before theirs in every legal order.
2. The compute lane runs one op at a time: between two points, all ops that need the first and are needed
   by the second pass.
3. A collective begins no sooner than the op that starts it, and ends before its wait. A lane carries one
   collective at a time in the order of starts; so of those on one lane whose starts are needed, the ones that
   start no earlier than a point all pass after it.
4. A distance is the largest that 2 and 3 give over every chain of waits in between: the longest path
   over lanes, in which stretches of compute count with their load, each for the least time that it takes on
   its lane (`stretto.processor.budget`).

Equal stages have equal shapes, and their distances are computed once. Cost is quadratic in a stage's ops with
matrix products, times its collectives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stretto.processor.budget import STEADY, Pace

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

NEVER = -np.inf
"""The distance between points of which none needs the other."""

_ROWS = 512
"""Rows of the relation that are numbers at one time: 4 MB a thousand ops."""


@dataclass(frozen=True, slots=True)
class StageCall:
    """A collective of a stage: the ops that start it and wait for it, its lane, its time."""

    start: int
    wait: int
    lane: str
    us: float


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage by numbers; ops in order, F first.

    uses[op]: ops that it reads, -1 - k for the k-th arriving value, and `-1 - arriving` for what is made once
    a step. sinks: points that are reached when
    all of these ops have ended (a message leaves, a sum of gradients begins).
    """

    time_us: tuple[float, ...]
    forwards: int
    uses: tuple[tuple[int, ...], ...]
    arriving: int
    calls: tuple[StageCall, ...]
    sinks: tuple[tuple[int, ...], ...]
    pace: Pace = STEADY


@dataclass(slots=True)
class Distances:
    """Microseconds by op; `NEVER` where there is no chain.

    from_start, from_arrival[k], from_made: from the stage's first op, the k-th arrival, or from when what is
    made once a step may be there, to the op's end.
    to_end, to_sink[k]: from the op's start to the end of all that needs it, or to the k-th sink.
    before_sink[k]: the ops that have ended when the sink is reached.
    pace: of the compute lane.
    """

    time_us: Array
    forward: Mask
    from_start: Array
    from_arrival: list[Array]
    from_made: Array
    to_end: Array
    to_sink: list[Array]
    before_sink: list[Mask]
    pace: Pace


def find_distances(shape: StageShape) -> Distances:
    """All distances of a stage's shape."""
    time_us: Array = np.array(shape.time_us, dtype=np.float64)
    count = len(time_us)
    needs, after = _needs(shape)
    waits = [call.wait for call in shape.calls]
    starts = [call.start for call in shape.calls]
    before = [np.logical_or.reduce(needs[list(sink)], axis=0) for sink in shape.sinks]
    everything = np.ones(count, dtype=bool)
    # 2. Sums of compute between every point and every op, all points at once.
    points = np.column_stack([everything, *after, *(needs[:, wait] for wait in waits)])
    up = shape.pace.least_us(_times(needs, points * time_us[:, None]))
    ends = np.column_stack([everything, *before, *(needs[start] for start in starts)])
    on = shape.pace.least_us(_times(needs.T, ends * time_us[:, None]))
    first_wait, first_start = 1 + len(after), 1 + len(before)
    # 3. The collectives of a lane by what they need.
    same = np.array([[a.lane == b.lane for b in shape.calls] for a in shape.calls], dtype=bool)
    earlier = same & needs[np.ix_(starts, starts)] if starts else same
    call_us = np.array([call.us for call in shape.calls])
    start_us = time_us[starts]
    onward = range(len(shape.calls))

    def forward_from(column: int, mask: Mask) -> Array:
        reached = np.where(mask, up[:, column], NEVER)
        for c in sorted(onward, key=lambda c: starts[c]):
            if mask[starts[c]]:
                before_it = earlier[c] & mask[starts]
                done_us = after_lane((reached[starts] - start_us)[before_it], call_us[before_it])
                passed_us = np.where(needs[:, waits[c]], done_us + up[:, first_wait + c], NEVER)
                reached = np.maximum(reached, passed_us)
        return reached

    def backward_from(column: int, mask: Mask) -> Array:
        left = np.where(mask, on[:, column], NEVER)
        for c in sorted(onward, key=lambda c: -waits[c]):
            if mask[waits[c]]:
                behind_it = earlier[:, c] & mask[waits]
                left_us = after_lane(left[waits][behind_it], call_us[behind_it])
                to_start_us = on[:, first_start + c] - start_us[c]
                left = np.maximum(left, np.where(needs[starts[c]], left_us + to_start_us, NEVER))
        return left

    *from_arrival, from_made = (forward_from(1 + k, mask) for k, mask in enumerate(after))
    return Distances(
        time_us,
        np.arange(count) < shape.forwards,
        forward_from(0, everything),
        from_arrival,
        from_made,
        backward_from(0, everything),
        [backward_from(1 + k, mask) for k, mask in enumerate(before)],
        before,
        shape.pace,
    )


def _needs(shape: StageShape) -> tuple[Mask, list[Mask]]:
    """Step 1: `needs[i, j]`: op i is op j or needs it; `after[k][i]`: op i needs the k-th arriving value, or
    as the last what is made once a step."""
    count = len(shape.time_us)
    needs: Mask = np.zeros((count, count), dtype=bool)
    arrived: Mask = np.zeros((count, shape.arriving + 1), dtype=bool)
    every_forward = np.arange(count) < shape.forwards
    by_forward = np.zeros(shape.arriving + 1, dtype=bool)
    for at, uses in enumerate(shape.uses):
        row = needs[at]
        row[at] = True
        if at >= shape.forwards:
            row |= every_forward
            arrived[at] |= by_forward
        for used in uses:
            if used >= 0:
                row |= needs[used]
                arrived[at] |= arrived[used]
            else:
                arrived[at, -1 - used] = True
        if at < shape.forwards:
            by_forward |= arrived[at]
    return needs, [*arrived.T]


def _times(relation: Mask, columns: Array) -> Array:
    rows = [relation[at : at + _ROWS].astype(np.float64) @ columns for at in range(0, len(relation), _ROWS)]
    return np.concatenate(rows) if rows else np.zeros((0, columns.shape[1]))


def after_lane(points_us: Array, times_us: Array, pace: Pace = STEADY) -> float:
    """When a lane has done several things, none of which begins before its point (or, seen backward, how long
    before the end it must begin). The largest of: a point, and the time of all that lies no earlier.
    pace: of the compute lane."""
    order = np.argsort(-points_us, kind="stable")
    return float((points_us[order] + pace.least_us(np.cumsum(times_us[order]))).max(initial=0.0))
