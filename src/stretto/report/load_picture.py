"""Loads of experts as a picture: a row for each layer, a cell for each expert, in one SVG.

A cell is as strong in colour as the expert is from its even share: orange above it (whole at twice), blue
below it (whole at none). Colours are of Okabe and Ito's palette, as the page's.
"""

from __future__ import annotations

from html import escape

from stretto.ir.metrics import ObservedRun
from stretto.report.load import Load, loads_of
from stretto.report.words import format_share

WIDTH_PX, ROW_PX, LABEL_PX, TOP_PX, GAP_PX = 1200, 24, 200, 26, 3
WIDEST_PX = 56
WORDS_PX = 40
"""A cell that is wider has its share written into it."""

MORE, LESS = "rgb(213,94,0)", "rgb(0,114,178)"


def draw_loads(run: ObservedRun) -> str | None:
    """The text of an SVG; None for a model without experts."""
    loads = loads_of(run.end)
    if not loads:
        return None
    experts = max(len(load.shares) for load in loads)
    cell = min(WIDEST_PX, (WIDTH_PX - LABEL_PX) / experts)
    every = max(1, round(WORDS_PX / 2 / cell))
    height = TOP_PX + ROW_PX * len(loads)
    out = [
        f'<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height}" '
        f'width="{WIDTH_PX}" height="{height}" role="img" aria-label="Load by layer and expert">'
    ]
    out += [
        _text(LABEL_PX + (at + 0.5) * cell, TOP_PX - 8, str(at), "middle") for at in range(0, experts, every)
    ]
    for row, load in enumerate(loads):
        top = TOP_PX + ROW_PX * row
        out.append(_text(LABEL_PX - 10, top + ROW_PX / 2 + 3, load.module, "end"))
        out += [_cell(load, at, LABEL_PX + at * cell, top, cell) for at in range(len(load.shares))]
    return "\n".join([*out, "</svg>"])


def _cell(load: Load, expert: int, left: float, top: float, width: float) -> str:
    share, even = load.shares[expert], 1.0 / len(load.shares)
    strength = min(1.0, abs(share / even - 1.0))
    colour = MORE if share > even else LESS
    gap = GAP_PX if width > 3 * GAP_PX else 0
    told = (
        f"{load.module}, expert {expert}: {format_share(share)} of the rows, "
        f"{format_share(load.least[expert])} to {format_share(load.most[expert])} in single steps"
    )
    words = ""
    if width > WORDS_PX:
        words = _text(left + (width - gap) / 2, top + ROW_PX / 2 + 3, format_share(share), "middle")
    return (
        f'<g><title>{escape(told)}</title><rect class="ground" x="{left:.1f}" y="{top}" '
        f'width="{width - gap:.1f}" height="{ROW_PX - GAP_PX}" rx="2"/><rect x="{left:.1f}" y="{top}" '
        f'width="{width - gap:.1f}" height="{ROW_PX - GAP_PX}" rx="2" fill="{colour}" '
        f'fill-opacity="{0.75 * strength:.2f}"/>{words}</g>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
