"""The page's two charts as SVG: the loss over steps, and the load of experts by layer.

Training loss is a line, held-out loss are dots. A cell of the load is as strong in colour as the expert is
from its even share: orange above it (full at twice), blue below it (full at none). Colours are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from stretto.ir.metrics import ObservedRun
from stretto.report.grid import format_share
from stretto.report.load import Load, loads_of
from stretto.schedule.draw import tick_times

WIDTH_PX = 1200
LOSS_HEIGHT_PX = 300
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 24, 34, 44
"""Margins of the loss."""
TICKS = 6

ROW_PX, LABEL_PX, HEAD_PX, GAP_PX = 24, 200, 26, 3
"""Of the load: a layer's row, its name, the experts' numbers above all, the gap between cells."""
WIDEST_CELL_PX = 56
WORDS_PX = 40
"""A cell that is wider has its share written into it."""
MORE, LESS = "rgb(213,94,0)", "rgb(0,114,178)"

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
    train, held_out = points_of(metrics, "loss"), points_of(metrics, "held_out_loss")
    if len(train) < 2:
        return None
    steps = [step for step, _ in (*train, *held_out)]
    values = [value for _, value in (*train, *held_out)]
    first, low = min(steps), min(values)
    wide, tall = (max(steps) - first) or 1.0, (max(values) - low) or 1.0
    right, bottom = WIDTH_PX - RIGHT_PX, LOSS_HEIGHT_PX - BOTTOM_PX

    def x(step: float) -> float:
        return LEFT_PX + (step - first) / wide * (right - LEFT_PX)

    def y(value: float) -> float:
        return TOP_PX + (low + tall - value) / tall * (bottom - TOP_PX)

    out = [
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{LOSS_HEIGHT_PX - 1}" rx="10"/>'
    ]
    for value in (low + tick for tick in tick_times(tall, tall / TICKS)):
        out.append(
            f'<line class="grid" x1="{LEFT_PX}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        out.append(_text(LEFT_PX - 8, y(value) + 4, f"{value:.4g}", "end"))
    for step in (first + tick for tick in tick_times(wide, max(1.0, wide / 10))):
        out.append(_text(x(step), bottom + 18, f"{step:g}", "middle"))
    out.append(_text((LEFT_PX + right) / 2, LOSS_HEIGHT_PX - 9, "step", "middle"))
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in train)
    out.append(f'<polyline class="train" points="{line}"/>')
    out += [
        f'<circle class="held" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.2">'
        f"<title>step {s:g}: {v:.4g}</title></circle>"
        for s, v in held_out
    ]
    out.append(f'<line class="train" x1="{LEFT_PX}" x2="{LEFT_PX + 18}" y1="18" y2="18"/>')
    out.append(_text(LEFT_PX + 24, 22, "training loss", "start"))
    if held_out:
        out.append(f'<circle class="held" cx="{LEFT_PX + 128}" cy="18" r="3.2"/>')
        out.append(_text(LEFT_PX + 138, 22, "held-out loss", "start"))
    return _svg(LOSS_HEIGHT_PX, "Loss over steps", out)


def draw_loads(run: ObservedRun) -> str | None:
    """A row for each layer and a cell for each expert, as the text of an SVG; None for a model without
    experts."""
    loads = loads_of(run.end)
    if not loads:
        return None
    experts = max(len(load.shares) for load in loads)
    cell = min(WIDEST_CELL_PX, (WIDTH_PX - LABEL_PX) / experts)
    numbered = range(0, experts, max(1, round(WORDS_PX / 2 / cell)))
    out = [_text(LABEL_PX + (at + 0.5) * cell, HEAD_PX - 8, str(at), "middle") for at in numbered]
    for row, load in enumerate(loads):
        top = HEAD_PX + ROW_PX * row
        out.append(_text(LABEL_PX - 10, top + ROW_PX / 2 + 3, load.module, "end"))
        out += [_cell(load, at, LABEL_PX + at * cell, top, cell) for at in range(len(load.shares))]
    return _svg(HEAD_PX + ROW_PX * len(loads), "Load by layer and expert", out)


def _cell(load: Load, expert: int, left: float, top: float, width: float) -> str:
    share, even = load.shares[expert], 1.0 / len(load.shares)
    strength, colour = min(1.0, abs(share / even - 1.0)), MORE if share > even else LESS
    gap = GAP_PX if width > 3 * GAP_PX else 0
    tip = (
        f"{load.module}, expert {expert}: {format_share(share)} of the rows, "
        f"{format_share(load.least[expert])} to {format_share(load.most[expert])} in single steps"
    )
    box = f'x="{left:.1f}" y="{top}" width="{width - gap:.1f}" height="{ROW_PX - GAP_PX}" rx="2"'
    words = ""
    if width > WORDS_PX:
        words = _text(left + (width - gap) / 2, top + ROW_PX / 2 + 3, format_share(share), "middle")
    return (
        f'<g><title>{escape(tip)}</title><rect class="ground" {box}/>'
        f'<rect {box} fill="{colour}" fill-opacity="{0.75 * strength:.2f}"/>{words}</g>'
    )


def _svg(height: int, label: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" '
        f'width="{WIDTH_PX}" height="{height}" role="img" aria-label="{label}">'
    )
    return "\n".join([head, *parts, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
