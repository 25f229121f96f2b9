"""A timeline's spans by rank and row: the one walk that every drawing of a timeline makes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from stretto.ir.timeline import COMPUTE_LANE, Span, Timeline

Rows = dict[str, list[Span]]
"""Name -> spans, ascending in time; the compute lane first, the others by name."""


def rows_of(timeline: Timeline, row_of: Callable[[str], str] = str) -> list[Rows]:
    """By rank, the rows on which its spans are drawn. row_of: the row of a lane; its own by default."""
    found: list[Rows] = [defaultdict(list) for _ in range(timeline.ranks)]
    for rows in found:
        rows[COMPUTE_LANE] = []
    for span in sorted(timeline.spans, key=lambda span: (span.start_us, span.end_us)):
        found[span.rank][row_of(span.lane)].append(span)
    return [dict(sorted(rows.items(), key=lambda item: (item[0] != COMPUTE_LANE, item[0]))) for rows in found]


def with_sums_together(lane: str) -> str:
    """The row of a lane where small sums, once a step each, share one."""
    return "sums" if lane == "loss" or lane.startswith("tied ") else lane
