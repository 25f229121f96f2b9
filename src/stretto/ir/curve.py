"""A time that grows with bytes, as straight pieces between points: what a plan carries of a collective.

Knows nothing of collectives or devices; numbers and their text form only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

MOST_BYTES = 1e18
"""Where lines that cross only further out count as never crossing: more than any memory has."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Microseconds over bytes, never decreasing.

    points: (bytes, us), bytes strictly ascending. Between two points the time is on their line; below the
    first it is the first's time (a latency); beyond the last it goes on with the last piece's slope, or stays
    when there is one point only.

    Raises ValueError that names the point when one is negative, not finite, or out of order.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one point (bytes, us)")
        for index, (nbytes, us) in enumerate(self.points):
            if not (math.isfinite(nbytes) and math.isfinite(us)) or nbytes < 0 or us < 0:
                raise ValueError(
                    f"point {index} of a curve, ({nbytes}, {us}): expected finite numbers from 0"
                )
            if index and nbytes <= self.points[index - 1][0]:
                raise ValueError(
                    f"point {index} of a curve: {nbytes} bytes do not come after those before it"
                )
            if index and us < self.points[index - 1][1]:
                raise ValueError(f"point {index} of a curve: {us} us is faster than fewer bytes are")

    def us(self, nbytes: float) -> float:
        """The time of `nbytes` bytes, in microseconds."""
        points = self.points
        if nbytes <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = min(bisect_right(points, nbytes, key=itemgetter(0)), len(points) - 1)
        (x0, y0), (x1, y1) = points[at - 1], points[at]
        if nbytes == x1:
            return y1  # exactly, where the line's arithmetic may be a rounding off
        us = y0 + (nbytes - x0) * ((y1 - y0) / (x1 - x0))
        return us if nbytes > x1 else min(us, y1)

    @staticmethod
    def fitted(samples: Iterable[tuple[float, float]]) -> Curve:
        """A curve through measured (bytes, us), in any order, repeated sizes allowed.

        What disturbs a measurement makes it slower, never faster: of equal sizes the fastest counts, and a
        size that took longer than a larger one takes the larger one's time. The flattest line from the
        first point to another is drawn on to zero bytes, which shows the latency of a sweep that begins with
        large messages: it is the one that a disturbed size has made no steeper.

        Raises ValueError when there is no sample.
        """
        fastest: dict[float, float] = {}
        for nbytes, us in samples:
            fastest[nbytes] = min(us, fastest.get(nbytes, math.inf))
        points: list[tuple[float, float]] = []
        for nbytes in sorted(fastest, reverse=True):
            us = min(fastest[nbytes], points[-1][1]) if points else fastest[nbytes]
            points.append((nbytes, us))
        points.reverse()
        if len(points) > 1 and points[0][0] > 0:
            x0, y0 = points[0]
            slope = min((y - y0) / (x - x0) for x, y in points[1:])
            points.insert(0, (0.0, max(0.0, y0 - x0 * slope)))
        return Curve(tuple(points))

    @staticmethod
    def lowest(lines: Iterable[tuple[float, float]]) -> Curve:
        """The fastest of several straight lines (latency us, us per byte) at every size, exactly."""
        # By latency; a line that starts later and rises no slower is never the fastest.
        best: list[tuple[float, float]] = []
        for latency, slope in sorted(lines):
            if best and slope >= best[-1][1]:
                continue
            # The last line is passed over where the new one crosses below its own start.
            while len(best) > 1 and _meet(best[-1], (latency, slope)) <= _meet(best[-2], best[-1]):
                best.pop()
            best.append((latency, slope))
        points = [(0.0, best[0][0])]
        latency, slope = best[0]
        for line, following in pairwise(best):
            at = _meet(line, following)
            if at > MOST_BYTES:
                break
            latency, slope = following
            if at > points[-1][0]:
                points.append((at, max(points[-1][1], line[0] + line[1] * at)))
        if slope > 0 or len(points) > 1:  # a flat end is a piece too
            beyond = 2.0 * max(points[-1][0], 1.0)
            points.append((beyond, max(points[-1][1], latency + slope * beyond)))
        return Curve(tuple(points))


def _meet(flatter_start: tuple[float, float], steeper_start: tuple[float, float]) -> float:
    """Bytes at which a line of smaller latency and larger slope meets one of larger latency."""
    return (steeper_start[0] - flatter_start[0]) / (flatter_start[1] - steeper_start[1])
