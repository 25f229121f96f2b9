"""Timelines as a picture: one self-contained SVG, any number of timelines on one common time scale.

Phases differ by colour, microbatches by tint, and both by the label in the box; exposed communication is
hatched red, bubbles are pale, messages lie on thin lanes below the rank that receives them. The picture
brings its own ground, light or dark as the reader prefers, and so stands on any page.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from stretto.files.whole_file import write_file
from stretto.ir.action import Phase
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.report.words import format_bytes, format_share, format_us

WIDTH_PX = 1200
LEFT_PX = 84
LONGEST_NAME = 10
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
LEAST_PX = 0.25
"""Narrower boxes would vanish; they are drawn this wide."""
VISIBLE_PX = 1.0
"""A message lane whose longest message is narrower than this is not drawn."""
TICKS = 8
"""Distances on the time axis, about."""

STYLE = """
text { font: 11px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.ground { fill: #ffffff; stroke: #d8dde4; }
.row { fill: #f4f6f8; }
.grid { stroke: #b9c2cd; stroke-dasharray: 2 4; }
.end { stroke: #1b2330; stroke-width: 1.2; }
.title { font-size: 14px; font-weight: 650; fill: #1b2330; }
.name { font-weight: 600; fill: #1b2330; }
.quiet { fill: #5d6878; }
.strong { font-weight: 650; fill: #c1121f; }
.small { font-size: 9px; fill: #5d6878; }
.box { text-anchor: middle; font-weight: 600; pointer-events: none; }
.tag { text-anchor: middle; font-size: 9px; font-weight: 600; pointer-events: none; }
.F0 { fill: #1f5fae; } .F1 { fill: #3878c7; } .F2 { fill: #17498a; }
.I0 { fill: #f0a030; } .I1 { fill: #f7bb5e; } .I2 { fill: #e08d22; }
.W0 { fill: #43a37d; } .W1 { fill: #68bb98; } .W2 { fill: #35906c; }
.B0 { fill: #a8457a; } .B1 { fill: #bb568b; } .B2 { fill: #8a3263; }
.tF, .tB { fill: #ffffff; } .tI { fill: #2b1800; } .tW { fill: #04180f; }
.bubble { fill: #e3e7ec; }
.hatch0 { fill: #ffdcd9; } .hatch1 { stroke: #d00000; stroke-width: 3.2; }
.exposed { fill: url(#hatch); stroke: #d00000; stroke-width: 1; }
.mF { fill: #a9c8ee; } .mI, .mB { fill: #fbd596; } .mW { fill: #b4dfcc; } .mx { fill: #c9c3ea; }
.tm { fill: #1b2330; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #14181f; stroke: #2c3440; }
  .row { fill: #1b2029; }
  .grid { stroke: #465161; }
  .end { stroke: #eef2f7; }
  .title, .name { fill: #eef2f7; }
  .quiet, .small { fill: #9aa6b5; }
  .strong { fill: #ff7b72; }
  .bubble { fill: #2a313c; }
  .hatch0 { fill: #4a1414; } .hatch1 { stroke: #ff5a52; }
  .exposed { stroke: #ff5a52; }
}
"""


def save_svg(timeline: Timeline, path: Path) -> None:
    """Draw one timeline into the file `path`."""
    write_file(path, draw([timeline]))


def draw(timelines: Sequence[Timeline], titles: Sequence[str] = ()) -> str:
    """Draw timelines above each other on a common time scale, as the text of an SVG.

    titles: one for each timeline, or none (then `simulated` and `measured`).
    """
    names = list(titles) or [timeline.source for timeline in timelines]
    assert len(names) == len(timelines), "one title a timeline"
    return _Picture(timelines, names).svg()


class _Picture:
    def __init__(self, timelines: Sequence[Timeline], titles: Sequence[str]) -> None:
        self.timelines = timelines
        self.titles = titles
        self.longest_us = max([t.step_us for t in timelines] + [1e-9])
        self.out: list[str] = []
        self.kinds: set[str] = set()

    def x(self, time_us: float) -> float:
        return LEFT_PX + time_us / self.longest_us * (WIDTH_PX - LEFT_PX - RIGHT_PX)

    def text(self, x: float, y: float, words: str, style: str, more: str = "") -> None:
        self.out.append(f'<text x="{x:.1f}" y="{y:.1f}" class="{style}"{more}>{escape(words)}</text>')

    def svg(self) -> str:
        y = 4.0
        for timeline, title in zip(self.timelines, self.titles, strict=True):
            y = self._timeline(timeline, title, y) + BLOCK_GAP_PX
        y = self._legend(y - BLOCK_GAP_PX)
        height = math.ceil(y)
        label = escape("; ".join(self.titles), quote=True)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" '
                f'width="{WIDTH_PX}" height="{height}" role="img" aria-label="Timelines: {label}">',
                f"<style>{STYLE}</style>",
                '<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
                'patternTransform="rotate(45)"><rect class="hatch0" width="7" height="7"/>'
                '<line class="hatch1" x1="1.6" y1="0" x2="1.6" y2="7"/></pattern></defs>',
                '<rect class="ground" x="0.5" y="0.5" rx="10" '
                f'width="{WIDTH_PX - 1}" height="{height - 1}"/>',
                *self.out,
                "</svg>",
                "",
            ]
        )

    # --- one timeline -------------------------------------------------------------------------------

    def _timeline(self, timeline: Timeline, title: str, y: float) -> float:
        step_us = timeline.step_us
        exposed_us = sum(timeline.by_rank(SpanKind.EXPOSED)) / max(1, timeline.ranks)
        bubble_us = sum(timeline.by_rank(SpanKind.BUBBLE)) / max(1, timeline.ranks)
        of = 1 / step_us if step_us else 0.0
        self.text(14, y + 20, title, "title")
        self.out.append(
            f'<text x="14" y="{y + 37:.1f}" class="quiet">step {escape(format_us(step_us))} · '
            f'mean of the ranks: <tspan class="strong">exposed communication {escape(format_us(exposed_us))} '
            f"({format_share(exposed_us * of)})</tspan> · "
            f"bubble {escape(format_us(bubble_us))} ({format_share(bubble_us * of)})</text>"
        )
        y += TITLE_PX
        lanes: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for span in timeline.spans:
            lanes[span.rank][span.lane].append(span)
        body: list[tuple[float, int, str, list[Span]]] = []
        top = y
        for rank in range(timeline.ranks):
            body.append((y, rank, COMPUTE_LANE, lanes[rank][COMPUTE_LANE]))
            y += LANE_PX + MESSAGE_GAP_PX
            for lane in sorted(name for name in lanes[rank] if name != COMPUTE_LANE):
                # A lane with nothing to see, such as the loss's few bytes, gets no row.
                if max(self.x(s.end_us) - self.x(s.start_us) for s in lanes[rank][lane]) < VISIBLE_PX:
                    continue
                body.append((y, rank, lane, lanes[rank][lane]))
                y += MESSAGE_PX + MESSAGE_GAP_PX
            y += RANK_GAP_PX
        y -= RANK_GAP_PX
        rows_end = y
        for row_y, rank, lane, _ in body:
            height = LANE_PX if lane == COMPUTE_LANE else MESSAGE_PX
            self.out.append(
                f'<rect class="row" x="{LEFT_PX}" y="{row_y:.1f}" width="{WIDTH_PX - LEFT_PX - RIGHT_PX}" '
                f'height="{height}"/>'
            )
            if lane == COMPUTE_LANE:
                self.text(14, row_y + LANE_PX / 2 + 4, _named(timeline.who(rank)), "name")
            else:
                self.text(LEFT_PX - 8, row_y + 10, _shortened(lane), "small", ' text-anchor="end"')
        self._axis(step_us, top, rows_end)
        for row_y, _, lane, spans in body:
            for at, span in enumerate(spans):
                if lane == COMPUTE_LANE:
                    self._compute(span, row_y)
                else:
                    # Latency is pipelined: the next message may begin before this one has arrived.
                    later = spans[at + 1].start_us if at + 1 < len(spans) else math.inf
                    self._message(span, row_y, min(span.end_us, later))
        return rows_end + AXIS_PX

    def _axis(self, step_us: float, top: float, bottom: float) -> None:
        tick_us = _nice(self.longest_us / TICKS)
        unit, scale = next((u, s) for limit, u, s in _UNITS if self.longest_us < limit)
        end_x = self.x(step_us)
        for k in range(int(self.longest_us / tick_us + 1e-9) + 1):
            x = self.x(k * tick_us)
            self.out.append(
                f'<line class="grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom + 4:.1f}"/>'
            )
            words = f"{k * tick_us / scale:g} {unit}"
            # The end of the step is labelled too, and goes first.
            if abs(x - end_x) > (len(words) + 9) * LEGEND_CHAR_PX / 2:
                self.text(x, bottom + 17, words, "quiet", ' text-anchor="middle"')
        self.out.append(
            f'<line class="end" x1="{end_x:.1f}" y1="{top - 3:.1f}" x2="{end_x:.1f}" y2="{bottom + 4:.1f}"/>'
        )
        at = min(end_x, WIDTH_PX - 34.0)
        self.text(at, bottom + 17, format_us(step_us), "name", ' text-anchor="middle"')

    def _box(self, style: str, span: Span, end_us: float, y: float, height: float) -> float:
        x, width = self.x(span.start_us), max(LEAST_PX, self.x(end_us) - self.x(span.start_us))
        self.out.append(
            f'<rect class="{style}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}">'
            f"<title>{escape(_tooltip(span))}</title></rect>"
        )
        return width

    def _compute(self, span: Span, y: float) -> None:
        middle = (self.x(span.start_us) + self.x(span.end_us)) / 2
        if span.kind is SpanKind.BUBBLE:
            self.kinds.add("bubble")
            self._box("bubble", span, span.end_us, y, LANE_PX)
        elif span.kind is SpanKind.EXPOSED:
            self.kinds.add("exposed")
            self._box("exposed", span, span.end_us, y + 0.5, LANE_PX - 1)
        else:
            phase = span.phase.value if span.phase is not None else "F"
            self.kinds.add(phase)
            width = self._box(f"{phase}{(span.microbatch or 0) % 3}", span, span.end_us, y, LANE_PX)
            number = str(span.microbatch)
            for words, char_px, style in (
                (span.name, CHAR_PX, "box"),
                (number, CHAR_PX, "box"),
                (number, SMALL_CHAR_PX, "tag"),
            ):
                if len(words) * char_px + words.count("W") * W_EXTRA_PX + 3 <= width:
                    self.text(middle, y + LANE_PX / 2 + 4, words, f"{style} t{phase}")
                    break

    def _message(self, span: Span, y: float, end_us: float) -> None:
        self.kinds.add("message")
        phase = span.phase.value if span.phase is not None else "x"
        width = self._box(f"m{phase}", span, end_us, y, MESSAGE_PX)
        middle = (self.x(span.start_us) + self.x(end_us)) / 2
        name = span.name.removeprefix(span.lane).strip()
        for words in (name, str(span.microbatch)) if span.microbatch is not None else (name or span.name,):
            if len(words) * SMALL_CHAR_PX + 4 <= width:
                self.text(middle, y + 10, words, "tag tm")
                break

    # --- the legend ---------------------------------------------------------------------------------

    def _legend(self, y: float) -> float:
        x = 14.0
        y += 14
        entries = [(f"{p.value}0", f"{p.value}  {p.meaning}") for p in Phase if p.value in self.kinds]
        entries += [("exposed", "exposed communication")] if "exposed" in self.kinds else []
        entries += [("bubble", "bubble: nothing to do")] if "bubble" in self.kinds else []
        entries += [("mF", "message, at its receiver")] if "message" in self.kinds else []
        for style, words in entries:
            width = 22 + len(words) * LEGEND_CHAR_PX + 16
            if x + width > WIDTH_PX - RIGHT_PX and x > 14:
                x, y = 14.0, y + 20
            self.out.append(f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="16" height="12"/>')
            self.text(x + 22, y + 10, words, "quiet")
            x += width
        return y + LEGEND_PX - 12


_UNITS = ((1e3, "us", 1.0), (1e6, "ms", 1e3), (math.inf, "s", 1e6))


def _nice(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value * (1 - 1e-9))


def _named(who: str) -> str:
    """The name of a row, without its first word where that does not fit."""
    return who if len(who) <= LONGEST_NAME else who.removeprefix("ranks ")


def _shortened(lane: str) -> str:
    most = int((LEFT_PX - 16) / SMALL_CHAR_PX)
    return lane if len(lane) <= most else lane[: most - 1] + "…"


def _tooltip(span: Span) -> str:
    words = {
        SpanKind.COMPUTE: span.name,
        SpanKind.EXPOSED: f"exposed: waits for {span.name}",
        SpanKind.BUBBLE: f"bubble: {span.name}",
        SpanKind.MESSAGE: f"message {span.name}",
    }[span.kind]
    words += f", {format_us(span.duration_us)} from {format_us(span.start_us)}"
    if span.nbytes:
        words += f", {format_bytes(span.nbytes)}"
    return words
