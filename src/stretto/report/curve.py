"""The loss curve of the page: training loss as a line, held-out loss as dots, in one SVG.

Colours are the page's (`page/page.css`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from stretto.schedule.draw import tick_times

WIDTH_PX, HEIGHT_PX = 1200, 300
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 24, 34, 44
TICKS = 6

Point = tuple[float, float]


def points_of(metrics: Sequence[dict[str, Any]], key: str) -> list[Point]:
    """(step, value) of the lines that have a finite number under `key`."""
    pairs = ((line.get("step"), line.get(key)) for line in metrics)
    return [
        (float(step), float(value))
        for step, value in pairs
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value)
    ]


def draw_loss(metrics: Sequence[dict[str, Any]]) -> str | None:
    """The loss over steps as the text of an SVG; None when fewer than two steps have a loss."""
    train, held = points_of(metrics, "loss"), points_of(metrics, "held_out_loss")
    if len(train) < 2:
        return None
    steps = [step for step, _ in train + held]
    values = [value for _, value in train + held]
    first, low = min(steps), min(values)
    wide, tall = (max(steps) - first) or 1.0, (max(values) - low) or 1.0

    def x(step: float) -> float:
        return LEFT_PX + (step - first) / wide * (WIDTH_PX - LEFT_PX - RIGHT_PX)

    def y(value: float) -> float:
        return TOP_PX + (low + tall - value) / tall * (HEIGHT_PX - TOP_PX - BOTTOM_PX)

    out = [
        f'<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" '
        f'width="{WIDTH_PX}" height="{HEIGHT_PX}" role="img" aria-label="Loss over steps">',
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{HEIGHT_PX - 1}" rx="10"/>',
    ]
    for value in (low + tick for tick in tick_times(tall, tall / TICKS)):
        out.append(
            f'<line class="grid" x1="{LEFT_PX}" x2="{WIDTH_PX - RIGHT_PX}" '
            f'y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        out.append(_text(LEFT_PX - 8, y(value) + 4, f"{value:.4g}", "end"))
    for step in (first + tick for tick in tick_times(wide, max(1.0, wide / 10))):
        out.append(_text(x(step), HEIGHT_PX - BOTTOM_PX + 18, f"{step:g}", "middle"))
    out.append(_text((LEFT_PX + WIDTH_PX - RIGHT_PX) / 2, HEIGHT_PX - 9, "step", "middle"))
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in train)
    out.append(f'<polyline class="train" points="{line}"/>')
    out += [
        f'<circle class="held" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.2">'
        f"<title>step {s:g}: {v:.4g}</title></circle>"
        for s, v in held
    ]
    out.append(f'<line class="train" x1="{LEFT_PX}" x2="{LEFT_PX + 18}" y1="18" y2="18"/>')
    out.append(_text(LEFT_PX + 24, 22, "training loss", "start"))
    if held:
        out.append(f'<circle class="held" cx="{LEFT_PX + 128}" cy="18" r="3.2"/>')
        out.append(_text(LEFT_PX + 138, 22, "held-out loss", "start"))
    return "\n".join([*out, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
