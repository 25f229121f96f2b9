"""Communication by axis and kind: how much there was, how much of it was exposed, how much was hidden.

Reads a timeline's spans by their names alone, so that predicted and measured steps are accounted alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace

from stretto.ir.axes import AXES, PIPELINE
from stretto.ir.timeline import Span, SpanKind, Timeline

_EDGE = re.compile(r"^e\d+(:\d+)?$")
_BUCKET = re.compile(r"^\d+\.\d+$")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communications of one axis and kind. count, nbytes: of the whole step, over all ranks. total_us,
    exposed_us: means over ranks, as `Timeline.comm_us` and `Timeline.exposed_us` define them: what overlaps
    in time counts once, so the kinds of an axis may add up to more than the axis."""

    axis: str
    kind: str
    count: int
    nbytes: int
    total_us: float
    exposed_us: float

    @property
    def hidden(self) -> float | None:
        """1 - exposed / total; None when the communication took no time."""
        return 1.0 - self.exposed_us / self.total_us if self.total_us else None


def communication_of(name: str) -> tuple[str, str]:
    """(axis, kind) of what a span is named for: `pp 0>1 e3:0` is a message, `tp all_reduce mm_3` all_reduce.

    A communication whose name begins with no axis belongs to pp, whose messages are the oldest names.
    """
    first, _, rest = name.partition(" ")
    axis, rest = (first, rest) if first in AXES else (PIPELINE, name)
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
    spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in (SpanKind.MESSAGE, SpanKind.EXPOSED):
            spans[communication_of(span.name)].append(span)
    result = (traffic_among(timeline, axis, kind, of) for (axis, kind), of in spans.items())
    order = {axis: at for at, axis in enumerate(AXES)}
    return tuple(sorted(result, key=lambda t: (order[t.axis], -t.total_us, t.kind)))


def axes_of(timeline: Timeline) -> tuple[Traffic, ...]:
    """All communication of a step by axis; the kind is `all`."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in (SpanKind.MESSAGE, SpanKind.EXPOSED):
            spans[span.axis].append(span)
    return tuple(traffic_among(timeline, axis, "all", spans[axis]) for axis in AXES if axis in spans)


def traffic_among(timeline: Timeline, axis: str, kind: str, spans: list[Span]) -> Traffic:
    """What some spans of an axis come to."""
    only = replace(timeline, spans=tuple(spans))
    messages = [span for span in spans if span.kind is SpanKind.MESSAGE]
    return Traffic(
        axis,
        kind,
        len(messages),
        sum(span.nbytes for span in messages),
        only.comm_us[axis],
        only.exposed_us.get(axis, 0.0),
    )
