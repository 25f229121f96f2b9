"""A schedule as a picture: one self-contained SVG, ranks down, time across.

Phases differ by colour and by the letter in the box, so that neither print nor colour blindness loses them.
The picture brings its own ground, light or dark as the reader prefers, and so stands on any page. May touch
`stretto.ir` and this folder's timing; reads and writes no file.
"""

from __future__ import annotations

import math
from html import escape

from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.timing import ScheduleTiming

ROW_PX = 34
GAP_PX = 8
MIN_LEFT_PX = 96
RIGHT_PX = 28
TOP_PX = 78
AXIS_PX = 30
LEGEND_PX = 44
CHAR_PX = 7.6
"""Width of a bold digit in the boxes' 11 px sans-serif: assumed, on the wide side, as fonts differ."""
W_EXTRA_PX = 3.5
"""A W is that much wider than a digit: assumed, as above."""
QUIET_CHAR_PX = 6.4
"""Mean width of a letter of the small plain text: assumed, as above."""
PADDING_PX = 6.0
"""Air in a box beside its label, both sides together."""
MAX_WIDTH_PX = 24_000
"""Wider pictures are not drawn by common browsers without loss; boxes become narrower instead."""
MIN_WIDTH_PX = 640

STYLE = """
  text { font: 11px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
  .ground { fill: #ffffff; stroke: #d8dde4; }
  .lane { fill: #f1f3f6; }
  .grid { stroke: #c9d0d9; stroke-dasharray: 2 4; }
  .title { font-size: 15px; font-weight: 650; fill: #1b2330; }
  .name { font-size: 12px; font-weight: 600; fill: #1b2330; }
  .quiet { fill: #5d6878; }
  .box { text-anchor: middle; font-weight: 600; pointer-events: none; }
  .F { fill: #2f6fbf; } .I { fill: #e8963a; } .W { fill: #3f9d78; } .B { fill: #b4527f; }
  .tF, .tB { fill: #ffffff; } .tI { fill: #2b1800; } .tW { fill: #04180f; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #14181f; stroke: #2c3440; }
    .lane { fill: #1e242d; }
    .grid { stroke: #3b4553; }
    .title, .name { fill: #eef2f7; }
    .quiet { fill: #9aa6b5; }
  }
"""


def to_svg(schedule: Schedule, timing: ScheduleTiming) -> str:
    """Draw the timed schedule as SVG text, with a legend, a time axis, and a tooltip on every action.

    Overlapped actions share their box's height. Labels that do not fit their box are left to the tooltip.
    """
    px_per_unit = _scale(schedule, timing)
    chart_px = timing.makespan * px_per_unit
    left = _left_px(schedule, timing)
    width = max(left + chart_px + RIGHT_PX, MIN_WIDTH_PX)
    bottom = TOP_PX + schedule.ranks * (ROW_PX + GAP_PX)
    height = bottom + AXIS_PX + LEGEND_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" role="img">',
        f"<title>{escape(_title(schedule))}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="10"/>',
        f'<text class="title" x="20" y="32">{escape(_title(schedule))}</text>',
        f'<text class="quiet" x="20" y="52">{escape(_subtitle(timing))}</text>',
    ]
    parts += _lanes(schedule, timing, left, chart_px)
    parts += _time_axis(timing, left, px_per_unit, bottom)
    for rank in range(schedule.ranks):
        parts += _boxes(schedule, timing, rank, left, px_per_unit)
    parts += _legend(schedule, left, bottom + AXIS_PX + 10)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def action_label(schedule: Schedule, rank: int, action: Action) -> str:
    """What an action's box says: phase and microbatch, after the stage where the rank holds several."""
    return f"{action.phase.value}{action.microbatch}" if len(schedule.stages_of(rank)) < 2 else str(action)


def tick_times(until: float, least_apart: float) -> list[float]:
    """Round times (1, 2 or 5 times a power of ten apart) from 0 to `until`, at least `least_apart` apart."""
    if until <= 0 or least_apart <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(least_apart))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least_apart * (1 - 1e-9))
    return [float(f"{step * index:.12g}") for index in range(math.floor(until / step + 1e-9) + 1)]


def _scale(schedule: Schedule, timing: ScheduleTiming) -> float:
    """Pixels for one unit of time: every label fits its box, within the picture's largest width."""
    if timing.makespan <= 0:
        return 0.0
    needed = 0.0
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            length = timing.end[action] - timing.start[action]
            if length > 0:
                needed = max(needed, (_text_px(action_label(schedule, rank, action)) + PADDING_PX) / length)
    most, least = (
        (width - _left_px(schedule, timing) - RIGHT_PX) / timing.makespan
        for width in (MAX_WIDTH_PX, MIN_WIDTH_PX)
    )
    return min(max(needed, least), most)


def _title(schedule: Schedule) -> str:
    stages, microbatches = _count(schedule.stages, "stage"), _count(schedule.microbatches, "microbatch")
    return f"{schedule.family}: {stages}, {microbatches}"


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _subtitle(timing: ScheduleTiming) -> str:
    figures = f"makespan {timing.makespan:.10g}  ·  bubble {timing.bubble_rate:.2%}"
    return f"{figures}  ·  live: most microbatches held at once"


def _left_px(schedule: Schedule, timing: ScheduleTiming) -> float:
    """The width of the column with the ranks' names."""
    longest = max(len(_memory(schedule, timing, rank)) for rank in range(schedule.ranks))
    return max(round(20 + longest * QUIET_CHAR_PX + 12), MIN_LEFT_PX)


def _text_px(label: str) -> float:
    return len(label) * CHAR_PX + (W_EXTRA_PX if "W" in label else 0.0)


def _memory(schedule: Schedule, timing: ScheduleTiming, rank: int) -> str:
    """The rank's live microbatches, stage by stage; its stages first, unless they are just its own number."""
    stages = schedule.stages_of(rank)
    live = "+".join(str(timing.peak_live[stage]) for stage in stages) or "0"
    held = f"stage {','.join(map(str, stages)) or 'none'} · " if stages != (rank,) else ""
    return f"{held}{live} live"


def _lanes(schedule: Schedule, timing: ScheduleTiming, left: float, chart_px: float) -> list[str]:
    parts = []
    for rank in range(schedule.ranks):
        y = _row_y(rank)
        parts += [
            f'<rect class="lane" x="{left:.0f}" y="{y}" width="{chart_px:.2f}" height="{ROW_PX}" rx="3"/>',
            f'<text class="name" x="20" y="{y + 15}">rank {rank}</text>',
            f'<text class="quiet" x="20" y="{y + 29}">{_memory(schedule, timing, rank)}</text>',
        ]
    return parts


def _time_axis(timing: ScheduleTiming, left: float, px_per_unit: float, bottom: int) -> list[str]:
    if px_per_unit <= 0:
        return []
    parts = [f'<text class="quiet" x="20" y="{bottom + 14}">time</text>']
    for time in tick_times(timing.makespan, 70 / px_per_unit):
        x = left + time * px_per_unit
        parts += [
            f'<line class="grid" x1="{x:.2f}" y1="{TOP_PX - 6}" x2="{x:.2f}" y2="{bottom}"/>',
            f'<text class="quiet" x="{x:.2f}" y="{bottom + 14}" text-anchor="middle">{time:.10g}</text>',
        ]
    return parts


def _boxes(
    schedule: Schedule, timing: ScheduleTiming, rank: int, left: float, px_per_unit: float
) -> list[str]:
    parts = []
    for slot in schedule.orders[rank]:
        share_px = ROW_PX / len(slot.actions)
        for index, action in enumerate(slot.actions):
            start, end = timing.start[action], timing.end[action]
            if end <= start:
                continue
            x, y = left + start * px_per_unit, _row_y(rank) + index * share_px
            wide = (end - start) * px_per_unit
            phase, label = action.phase.value, action_label(schedule, rank, action)
            # One pixel between neighbours tells equal phases apart; very narrow boxes keep what they have.
            drawn = wide - 1 if wide > 3 else wide
            parts.append(
                f'<rect class="{phase}" x="{x:.2f}" y="{y:.1f}" rx="{2 if wide > 8 else 0}" '
                f'width="{drawn:.2f}" height="{share_px - 1:.1f}">'
                f"<title>{action}: {start:.10g} to {end:.10g}</title></rect>"
            )
            if _text_px(label) <= wide and share_px >= 12:
                middle_x, base_y = x + drawn / 2, y + share_px / 2 + 3.5
                parts.append(f'<text class="box t{phase}" x="{middle_x:.2f}" y="{base_y:.1f}">{label}</text>')
    return parts


def _legend(schedule: Schedule, left: float, y: int) -> list[str]:
    used = {action.phase for rank in range(schedule.ranks) for action in schedule.actions(rank)}
    entries = [(phase.value, phase.value, phase.meaning) for phase in Phase if phase in used]
    entries.append(("lane", "", "idle"))
    parts, x = [], left
    for style, letter, name in entries:
        parts.append(f'<rect class="{style}" x="{x:.0f}" y="{y}" width="18" height="16" rx="2"/>')
        if letter:
            parts.append(f'<text class="box t{letter}" x="{x + 9:.0f}" y="{y + 12}">{letter}</text>')
        parts.append(f'<text class="quiet" x="{x + 24:.0f}" y="{y + 12}">{name}</text>')
        x += 24 + len(name) * QUIET_CHAR_PX + 18
    return parts


def _row_y(rank: int) -> int:
    return TOP_PX + rank * (ROW_PX + GAP_PX)
