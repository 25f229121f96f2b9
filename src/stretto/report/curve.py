"""The loss curve as a picture: training loss as a line, held-out loss as dots, in one self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH_PX = 1200
HEIGHT_PX = 300
LEFT_PX = 64
RIGHT_PX = 24
TOP_PX = 34
BOTTOM_PX = 44
TICKS = 6

STYLE = """
.curve text { font: 11px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.curve .ground { fill: #ffffff; stroke: #d8dde4; }
.curve .grid { stroke: #e3e7ec; }
.curve .quiet { fill: #5d6878; }
.curve .train { fill: none; stroke: #1f5fae; stroke-width: 1.8; stroke-linejoin: round; }
.curve .held { fill: #c1121f; }
@media (prefers-color-scheme: dark) {
  .curve .ground { fill: #14181f; stroke: #2c3440; }
  .curve .grid { stroke: #2a313c; }
  .curve .quiet { fill: #9aa6b5; }
  .curve .train { stroke: #6aa5ec; }
  .curve .held { fill: #ff7b72; }
}
"""

Point = tuple[float, float]


def points_of(metrics: Sequence[dict[str, Any]], key: str) -> list[Point]:
    """(step, value) of the lines that have a finite number under `key`."""
    found = []
    for line in metrics:
        step, value = line.get("step"), line.get(key)
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value):
            found.append((float(step), float(value)))
    return found


def draw_loss(metrics: Sequence[dict[str, Any]]) -> str | None:
    """The loss over steps as the text of an SVG; None when fewer than two steps have a loss."""
    train, held = points_of(metrics, "loss"), points_of(metrics, "held_out_loss")
    if len(train) < 2:
        return None
    steps = [step for step, _ in train + held]
    values = [value for _, value in train + held]
    first, last = min(steps), max(steps)
    tick = _nice((max(values) - min(values)) / TICKS)
    low, high = math.floor(min(values) / tick) * tick, math.ceil(max(values) / tick) * tick

    def x(step: float) -> float:
        return LEFT_PX + (step - first) / ((last - first) or 1.0) * (WIDTH_PX - LEFT_PX - RIGHT_PX)

    def y(value: float) -> float:
        return TOP_PX + (high - value) / ((high - low) or 1.0) * (HEIGHT_PX - TOP_PX - BOTTOM_PX)

    out = [
        f'<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" '
        f'width="{WIDTH_PX}" height="{HEIGHT_PX}" role="img" aria-label="Loss over steps">',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{HEIGHT_PX - 1}" rx="10"/>',
    ]
    for k in range(round((high - low) / tick) + 1):
        value = low + k * tick
        out.append(
            f'<line class="grid" x1="{LEFT_PX}" x2="{WIDTH_PX - RIGHT_PX}" '
            f'y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        out.append(_text(LEFT_PX - 8, y(value) + 4, f"{value:.4g}", "end"))
    step_tick = max(1.0, _nice((last - first) / 10))
    for k in range(math.ceil(first / step_tick), math.floor(last / step_tick) + 1):
        out.append(_text(x(k * step_tick), HEIGHT_PX - BOTTOM_PX + 18, f"{k * step_tick:g}", "middle"))
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
    return f'<text class="quiet" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _nice(value: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is not below `value`; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= value * (1 - 1e-9))
