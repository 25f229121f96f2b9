"""Timelines and schedules as a picture: one self-contained SVG, all timelines on one common time scale.

Phases differ by colour, microbatches by tint, and both by the label in the box; exposed communication is
hatched red, bubbles are pale, messages are on thin lanes below the rank that receives them; every lane that
carries something is there. A box is as wide as its time, however short: what is narrower than a pixel is
drawn fainter, not wider. Actions of equal times on one lane, which a schedule overlaps, share its height. The
picture brings its own ground, light or dark as the reader prefers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from stretto.files.whole_file import write_file
from stretto.ir.action import ONCE_PHASES, Phase, Schedule
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.report.detail import ONCE_A_STEP, rows_of, span_category
from stretto.report.grid import counted, format_bytes, format_us, source_word
from stretto.schedule.draw import tick_times, to_timeline
from stretto.schedule.timing import ScheduleTiming

WIDTH_PX = 1200
MAX_WIDTH_PX = 24_000
"""Wider pictures are not drawn by common browsers without loss; boxes become narrower instead."""
LEFT_PX = 84
LONGEST_NAME = 10
"""Letters of a row's name that fit."""
RIGHT_PX = 24
TITLE_PX = 46
LANE_PX = 28
MESSAGE_PX = 13
MESSAGE_GAP_PX = 2
RANK_GAP_PX = 9
BLOCK_GAP_PX = 14
AXIS_PX = 26
LEGEND_PX = 40
CHAR_PX = 6.9
"""Width of a character of the boxes' 11 px semibold text: assumed, on the wide side, as fonts differ."""
W_EXTRA_PX = 4.5
"""A W is that much wider than a digit: assumed, as above."""
SMALL_CHAR_PX = 5.6
"""The same for the 9 px text on messages, and of the legend's letters above that: assumed."""
LEGEND_CHAR_PX = 6.3
EDGED_PX = 4.0
"""Exposed boxes of this width and more have an edge, which would make a narrower one seem longer."""
TICK_PX = 100
"""Between two times on the axis, at least."""

STYLE = "\n" + files("stretto.report").joinpath("page", "picture.css").read_text(encoding="utf-8")


def save_svg(timeline: Timeline, path: Path) -> None:
    """Draw one timeline into the file `path`."""
    write_file(path, draw([timeline]))


def draw(timelines: Sequence[Timeline]) -> str:
    """Draw timelines above each other on a common time scale, as the text of an SVG."""
    names = [source_word(timeline.source) for timeline in timelines]
    picture = _Picture(max([t.step_us for t in timelines] + [1e-9]))
    for timeline, title in zip(timelines, names, strict=True):
        picture.title(title, step_line(timeline))
        picture.timeline(timeline)
    return picture.svg("; ".join(names))


def draw_schedule(schedule: Schedule, timing: ScheduleTiming) -> str:
    """Draw a timed schedule as the text of an SVG; times are in the unit that was put in.

    As wide as its labels need, up to `MAX_WIDTH_PX`.
    """
    labels: dict[str, str] = {}
    for rank in range(schedule.ranks):
        alone = len(schedule.stages_of(rank)) < 2  # then its actions need no stage
        labels |= {
            str(a): f"{a.phase.value}{a.microbatch}" if alone else str(a) for a in schedule.actions(rank)
        }
    timeline = to_timeline(schedule, timing)
    needed = [
        (_text_px(labels[span.name]) + 3) / span.duration_us
        for span in timeline.spans
        if span.kind is SpanKind.COMPUTE and span.duration_us
    ]
    chart_px = max(needed, default=0.0) * timing.makespan
    width = min(max(math.ceil(LEFT_PX + chart_px + RIGHT_PX), WIDTH_PX), MAX_WIDTH_PX)
    picture = _Picture(max(timing.makespan, 1e-9), width, "{:.10g}".format, lambda span: labels[span.name])
    title = f"{schedule.family}: {counted(schedule.stages, 'stage')}, "
    title += counted(schedule.microbatches, "microbatch")
    live = " ".join(map(str, timing.peak_live))
    picture.title(
        title,
        f"makespan {timing.makespan:.10g} · bubble {timing.bubble_rate:.2%} · "
        f"most live microbatches, by stage: {live}",
    )
    picture.timeline(timeline)
    return picture.svg(title)


@dataclass(slots=True)
class _Picture:
    """What is drawn so far. longest_us: is as wide as the chart. format_time: a time in words."""

    longest_us: float
    width_px: int = WIDTH_PX
    format_time: Callable[[float], str] = format_us
    label: Callable[[Span], str] = lambda span: span.name
    y: float = 4.0
    out: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    def x(self, time_us: float) -> float:
        return LEFT_PX + time_us / self.longest_us * self.chart_px

    @property
    def chart_px(self) -> float:
        return self.width_px - LEFT_PX - RIGHT_PX

    def text(self, x: float, y: float, words: str, style: str, anchor: str = "") -> None:
        anchor = anchor and f' text-anchor="{anchor}"'
        self.out.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"{anchor}>{escape(words)}</text>')

    def svg(self, label: str) -> str:
        y = self._legend(self.y - BLOCK_GAP_PX)
        height = math.ceil(y)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width_px} {height}" '
                f'width="{self.width_px}" height="{height}" role="img" '
                f'aria-label="Timelines: {escape(label, quote=True)}">',
                f"<title>{escape(label)}</title>",
                f"<style>{STYLE}</style>",
                '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><rect class="hatch0" width="7" height="7"/>'
                '<line class="hatch1" x1="1.6" y1="0" x2="1.6" y2="7"/></pattern></defs>',
                '<rect class="ground" x="0.5" y="0.5" rx="10" '
                f'width="{self.width_px - 1}" height="{height - 1}"/>',
                *self.out,
                "</svg>",
                "",
            ]
        )

    # --- one timeline -------------------------------------------------------------------------------

    def title(self, title: str, line: str) -> None:
        """A title, and a line of figures below it."""
        self.text(14, self.y + 20, title, "title")
        self.text(14, self.y + 37, line, "quiet")
        self.y += TITLE_PX

    def timeline(self, timeline: Timeline) -> None:
        body: list[tuple[float, int, str, list[Span]]] = []
        y = top = self.y
        for rank, rows in enumerate(rows_of(timeline)):
            for lane, spans in rows.items():
                body.append((y, rank, lane, spans))
                y += _height(lane) + MESSAGE_GAP_PX
            y += RANK_GAP_PX
        y -= RANK_GAP_PX
        for row_y, rank, lane, _ in body:
            self.out.append(
                f'<rect class="row" x="{LEFT_PX}" y="{row_y:.1f}" width="{self.chart_px}" '
                f'height="{_height(lane)}"/>'
            )
            if lane == COMPUTE_LANE:
                who = timeline.who(rank)
                who = who if len(who) <= LONGEST_NAME else who.removeprefix("ranks ")
                self.text(14, row_y + LANE_PX / 2 + 4, who, "name")
            else:
                self.text(LEFT_PX - 8, row_y + 10, _shortened(lane), "small", "end")
        self._axis(timeline.step_us, top, y)
        for row_y, _, lane, spans in body:
            if lane == COMPUTE_LANE:
                for _, together in groupby(spans, key=lambda span: (span.start_us, span.end_us)):
                    self._compute(list(together), row_y)
                continue
            for at, span in enumerate(spans):
                # Latency is pipelined: the next message may begin before this one has arrived.
                later = spans[at + 1].start_us if at + 1 < len(spans) else math.inf
                self._message(span, row_y, min(span.end_us, later))
        self.y = y + AXIS_PX + BLOCK_GAP_PX

    def _axis(self, step_us: float, top: float, bottom: float) -> None:
        end_x = self.x(step_us)
        for time_us in tick_times(self.longest_us, self.longest_us / self.chart_px * TICK_PX):
            x = self.x(time_us)
            self.out.append(
                f'<line class="grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom + 4:.1f}"/>'
            )
            words = self.format_time(time_us)
            # The end of the step is labelled too, and goes first.
            if abs(x - end_x) > (len(words) + 9) * LEGEND_CHAR_PX / 2:
                self.text(x, bottom + 17, words, "quiet", "middle")
        self.out.append(
            f'<line class="end" x1="{end_x:.1f}" y1="{top - 3:.1f}" x2="{end_x:.1f}" y2="{bottom + 4:.1f}"/>'
        )
        self.text(min(end_x, self.width_px - 34.0), bottom + 17, self.format_time(step_us), "name", "middle")

    def _box(self, style: str, span: Span, end_us: float, y: float, height: float) -> float:
        x, width = self.x(span.start_us), self.x(end_us) - self.x(span.start_us)
        self.out.append(
            f'<rect class="{style}" x="{x:.2f}" y="{y:.1f}" width="{width:.6g}" height="{height:g}">'
            f"<title>{escape(self._tooltip(span))}</title></rect>"
        )
        return width

    def _compute(self, together: Sequence[Span], y: float) -> None:
        height = LANE_PX / len(together)
        for at, span in enumerate(together):
            if span.kind is not SpanKind.COMPUTE:
                self.kinds.add(span.kind.value)
                edged = (
                    span.kind is SpanKind.EXPOSED and self.x(span.end_us) - self.x(span.start_us) >= EDGED_PX
                )
                self._box(f"{span.kind.value}{' edged' * edged}", span, span.end_us, y, height)
                continue
            phase = span_category(span)
            self.kinds.add(phase)
            top = y + at * height
            width = self._box(f"{phase}{(span.microbatch or 0) % 3}", span, span.end_us, top, height)
            name, number = self.label(span), "" if phase == ONCE_A_STEP else str(span.microbatch)
            sizes = ((_text_px(name), name, "box"), (_text_px(number), number, "box"))
            for text_px, words, style in (*sizes, (len(number) * SMALL_CHAR_PX, number, "tag")):
                if text_px + 3 <= width and height >= LANE_PX / 2:
                    self._label(span, span.end_us, top + height / 2 + 4, words, f"{style} t{phase}")
                    break

    def _message(self, span: Span, y: float, end_us: float) -> None:
        self.kinds.add("message")
        phase = span.phase.value if span.phase is not None and span.phase not in ONCE_PHASES else "x"
        width = self._box(f"m{phase}", span, end_us, y, MESSAGE_PX)
        number = [str(span.microbatch)] if span.microbatch is not None else []
        for words in (span.name.removeprefix(span.lane).strip() or span.name, *number):
            if len(words) * SMALL_CHAR_PX + 4 <= width:
                self._label(span, end_us, y + 10, words, "tag tm")
                break

    def _label(self, span: Span, end_us: float, y: float, words: str, style: str) -> None:
        self.text((self.x(span.start_us) + self.x(end_us)) / 2, y, words, style)

    def _tooltip(self, span: Span) -> str:
        words = {
            SpanKind.COMPUTE: span.name,
            SpanKind.EXPOSED: f"exposed: waits for {span.name}",
            SpanKind.BUBBLE: f"bubble: {span.name}" if span.name else "bubble",
            SpanKind.MESSAGE: f"message {span.name}",
        }[span.kind]
        words += f", {self.format_time(span.duration_us)} from {self.format_time(span.start_us)}"
        return f"{words}, {format_bytes(span.nbytes)}" if span.nbytes else words

    # --- the legend ---------------------------------------------------------------------------------

    def _legend(self, y: float) -> float:
        x = 14.0
        y += 14
        entries = [(p.value, f"{p.value}0", f"{p.value}  {p.meaning}") for p in Phase if p not in ONCE_PHASES]
        entries.append((ONCE_A_STEP, "S0", "S  once a step"))
        entries += [
            ("exposed", "exposed", "exposed communication"),
            ("bubble", "bubble", "bubble: nothing to do"),
            ("message", "mF", "message at its receiver, or a collective"),
        ]
        for kind, style, words in entries:
            if kind not in self.kinds:
                continue
            width = 22 + len(words) * LEGEND_CHAR_PX + 16
            if x + width > self.width_px - RIGHT_PX and x > 14:
                x, y = 14.0, y + 20
            self.out.append(f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="16" height="12"/>')
            self.text(x + 22, y + 10, words, "quiet")
            x += width
        return y + LEGEND_PX - 12


def step_line(timeline: Timeline) -> str:
    """A step's figures in one line."""
    exposed = ", ".join(
        f"{axis} {format_us(us)}" for axis, us in sorted(timeline.exposed_us.items()) if us > 0.0
    )
    return (
        f"step {format_us(timeline.step_us)}, exposed {exposed or 'nothing'} (mean of the {timeline.counted})"
    )


def _height(lane: str) -> float:
    return LANE_PX if lane == COMPUTE_LANE else MESSAGE_PX


def _text_px(words: str) -> float:
    return len(words) * CHAR_PX + words.count("W") * W_EXTRA_PX


def _shortened(lane: str) -> str:
    most = int((LEFT_PX - 16) / SMALL_CHAR_PX)
    return lane if len(lane) <= most else lane[: most - 1] + "…"
