"""A timeline or schedule in the terminal: a line a lane, a cell for what filled most of its stretch of time.

Letters distinguish first and colours second, so that a file or a plain terminal shows the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from rich.text import Text

from stretto.ir.action import ONCE_PHASES, Schedule
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.report.detail import ONCE_A_STEP, rows_of, span_category
from stretto.report.grid import format_us, source_word
from stretto.schedule.draw import to_timeline
from stretto.schedule.timing import ScheduleTiming

LABEL_CELLS = 13
"""Columns of the names, at least."""
MOST_CELLS = 24
"""Columns of an action in the mean, at most, where a label of a short one would need more. Assumed."""
MOST_RANKS = 16
"""Of more ranks the first and the last half of as many are drawn."""

STYLES = {
    "F": "white on rgb(0,114,178)",
    "I": "black on rgb(230,159,0)",
    "W": "black on rgb(0,158,115)",
    "B": "white on rgb(168,69,122)",
    "S": "black on rgb(240,228,66)",
    "exposed": "rgb(213,94,0)",
    "bubble": "bright_black",
    "message": "rgb(133,119,201)",
}
"""The colours of the page, for those who see them (Okabe and Ito's palette)."""


def schedule_text(schedule: Schedule, timing: ScheduleTiming, width: int | None = None) -> Text:
    """A timed schedule, likewise; without a width, in as many columns as its labels need."""
    timeline = to_timeline(schedule, timing)
    slots = groupby(timeline.spans, key=lambda span: (span.rank, span.start_us, span.end_us))
    overlapped = [list(together) for _, together in slots]
    spans = tuple(replace(of[0], name="+".join(span.name for span in of)) for of in overlapped)
    if width is None:
        needs = [(len(s.name) + 2) / s.duration_us for s in spans if s.kind is SpanKind.COMPUTE]
        most = MOST_CELLS * (max(map(len, schedule.orders)) + schedule.ranks)
        width = LABEL_CELLS + min(math.ceil(max(needs, default=0.0) * timing.makespan), most)
    return timeline_text(replace(timeline, spans=spans), width, "{:.10g}".format)


def timeline_text(
    timeline: Timeline, width: int = 100, format_time: Callable[[float], str] = format_us
) -> Text:
    """The timeline as lines of `width` columns, with a title, a scale and a legend."""
    label_cells = max(LABEL_CELLS, 1 + len(timeline.who(timeline.ranks - 1)))
    cells = max(1, width - label_cells)
    text = Text(f"Timeline, {source_word(timeline.source)}\n", style="bold")
    lanes = rows_of(timeline)
    half = MOST_RANKS // 2
    drawn = [rank for rank in range(timeline.ranks) if rank < half or rank >= timeline.ranks - half]
    for before, rank in zip([-1, *drawn], drawn):
        if rank != before + 1:
            first, last = (before + 1) * timeline.members, rank * timeline.members - 1
            text.append(f"{'':{label_cells}}ranks {first} to {last} are left out\n", style="dim")
        for name, spans in lanes[rank].items():
            label = timeline.who(rank) if name == COMPUTE_LANE else f"  {name}"
            text.append(f"{label[: label_cells - 1]:{label_cells}}")
            text.append_text(_line(spans, timeline.step_us, cells, name == COMPUTE_LANE))
            text.append("\n")
    end = format_time(timeline.step_us)
    text.append(f"{'':{label_cells}}0{end:>{cells - 1}}\n", style="dim")
    text.append_text(_legend(timeline, width))
    return text


def _line(spans: Sequence[Span], step_us: float, cells: int, compute: bool) -> Text:
    """Cells in a row; cells of one span are one box with its name."""
    winner: list[Span | None] = [None] * cells
    most = [0.0] * cells
    scale = cells / step_us if step_us else 0.0
    for span in spans:
        first, last = span.start_us * scale, span.end_us * scale
        for cell in range(int(first), min(cells, int(last) + 1)):
            covered = min(last, cell + 1) - max(first, cell)
            if covered > most[cell] + 1e-9:
                winner[cell], most[cell] = span, covered
    text = Text()
    for _, together in groupby(winner, key=_box_key):
        shown, *more = together
        width = 1 + len(more)
        if shown is None:
            text.append(" " * width)
        else:
            text.append(_box(shown, width, compute), style=STYLES[span_category(shown)])
    return text


def _box_key(span: Span | None) -> object:
    """Equal for spans that are drawn as one: pieces of one action, waiting of one kind, nothing."""
    if span is None or span.kind in (SpanKind.EXPOSED, SpanKind.BUBBLE):
        return span and span.kind
    return span.kind, span.name


def _box(span: Span, width: int, compute: bool) -> str:
    if span.kind is SpanKind.EXPOSED:
        return "/" * width
    if span.kind is SpanKind.BUBBLE:
        return "·" * width
    if not compute:
        return "=" * width
    letter = span_category(span)
    number = "" if span.phase in ONCE_PHASES else span.microbatch
    words = next((w for w in (span.name, f"{letter}{number}", letter) if len(w) <= width), letter)
    # A box begins with its name, so that neighbours of one colour can be distinguished.
    return words + "-" * (width - len(words))


def _legend(timeline: Timeline, width: int) -> Text:
    signs: list[tuple[str, str, str]] = []
    compute = (s for s in timeline.spans if s.kind is SpanKind.COMPUTE and s.phase)
    meanings = {span_category(s): s.phase.meaning for s in compute if s.phase is not None}
    if ONCE_A_STEP in meanings:
        meanings[ONCE_A_STEP] = "once a step"
    for letter in sorted(meanings, key="FIWBS".index):
        signs.append((f" {letter} ", STYLES[letter], meanings[letter].partition(" (")[0]))
    kinds = {span.kind for span in timeline.spans}
    for kind, sign, words in (
        (SpanKind.EXPOSED, "//", "exposed"),
        (SpanKind.BUBBLE, "··", "bubble"),
        (SpanKind.MESSAGE, "==", "communication"),
    ):
        if kind in kinds:
            signs.append((sign, STYLES[kind.value], words))
    lines = [Text(" " * LABEL_CELLS)]
    for sign, style, words in signs:
        if lines[-1].cell_len + len(f"{sign} {words}") > width:
            lines.append(Text(" " * LABEL_CELLS))
        lines[-1].append(sign, style=style).append(f" {words}  ")
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)
