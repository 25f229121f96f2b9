"""Communication by axis and kind: how much there was, how much of it stood exposed, how much was hidden.

Reads a timeline's spans by their names alone, so that predicted and measured steps are accounted alike. May
touch `stretto.ir` only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from stretto.ir.mesh import AXES
from stretto.ir.timeline import SpanKind, Timeline

_EDGE = re.compile(r"^e\d+(:\d+)?$")
_BUCKET = re.compile(r"^\d+\.\d+$")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communications of one axis and kind. count: in the whole step, over all ranks; times are means over
    ranks, so that they compare with the step; nbytes: over all ranks."""

    axis: str
    kind: str
    count: int
    nbytes: int
    total_us: float
    exposed_us: float

    @property
    def hidden(self) -> float | None:
        """1 - exposed / total, at least 0 (a lane may wait longer than a transfer takes, where it queues);
        None when the communication took no time."""
        return max(0.0, 1.0 - self.exposed_us / self.total_us) if self.total_us else None


def communication_of(name: str) -> tuple[str, str]:
    """(axis, kind) of what a span is named for: `pp 0>1 e3:0` is a message, `tp all_reduce mm_3` all_reduce.

    A communication whose name begins with no axis belongs to pp, whose messages are the oldest names.
    """
    first, _, rest = name.partition(" ")
    axis, rest = (first, rest) if first in AXES else ("pp", name)
    word = rest.split(" ")[0]
    if ">" in word or _EDGE.match(word):
        return axis, "message"
    if word == "tied":
        return axis, "tied gradients"
    if word == "reduce" or _BUCKET.match(word):
        return axis, "gradients"
    return axis, word


def traffic_of(timeline: Timeline) -> tuple[Traffic, ...]:
    """All communication of a step by axis and kind, in the order of axes, the longest kind first."""
    count: dict[tuple[str, str], int] = defaultdict(int)
    nbytes: dict[tuple[str, str], int] = defaultdict(int)
    total: dict[tuple[str, str], float] = defaultdict(float)
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    for span in timeline.spans:
        if span.kind is SpanKind.MESSAGE:
            key = communication_of(span.name)
            count[key] += 1
            nbytes[key] += span.nbytes
            total[key] += span.duration_us / timeline.ranks
        elif span.kind is SpanKind.EXPOSED:
            exposed[communication_of(span.name)] += span.duration_us / timeline.ranks
    found = [
        Traffic(*key, count[key], nbytes[key], total[key], exposed[key])
        for key in dict.fromkeys((*total, *exposed))
    ]
    place = {axis: at for at, axis in enumerate(AXES)}
    return tuple(sorted(found, key=lambda t: (place.get(t.axis, len(place)), -t.total_us, t.kind)))


def by_axis(kinds: tuple[Traffic, ...]) -> tuple[Traffic, ...]:
    """The same, added up over the kinds of each axis."""
    found: dict[str, Traffic] = {}
    for one in kinds:
        so_far = found.get(one.axis, Traffic(one.axis, "all", 0, 0, 0.0, 0.0))
        found[one.axis] = Traffic(
            one.axis,
            "all",
            so_far.count + one.count,
            so_far.nbytes + one.nbytes,
            so_far.total_us + one.total_us,
            so_far.exposed_us + one.exposed_us,
        )
    return tuple(found.values())
