"""What a model shows of its steps, in tables and sentences: loads by expert, and whatever else it observes.

Of a layer with experts (a module that observes `rows`) tables show shares, of any other metric its numbers. A
cell of the table of all experts is as strong in colour as the expert is from its even share: orange above it
(full at twice), blue below it (full at none). The loss over steps is an SVG.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from stretto.ir.metrics import BUFFER, DROPPED, ROWS, Observed, ObservedRun
from stretto.report.grid import Grid, format_share
from stretto.schedule.draw import tick_times

MOST_NAMED = 6
"""Experts that a cell names."""


@dataclass(frozen=True, slots=True)
class Load:
    """A layer's experts over some steps, as shares of the rows that its router sends.

    shares, least, most: by expert, in the mean of the steps, in the step with the least and the most of it.
    dropped: share of the rows; None where none can be. buffer: as `ir.metrics.BUFFER`, the most.
    """

    module: str
    steps: int
    rows: float
    shares: tuple[float, ...]
    least: tuple[float, ...]
    most: tuple[float, ...]
    dropped: float | None
    buffer: float | None

    @property
    def without(self) -> tuple[int, ...]:
        """Experts that got none in any step."""
        return tuple(e for e, share in enumerate(self.most) if share == 0.0)


def loads_of(observed: Sequence[Observed]) -> tuple[Load, ...]:
    """Of all layers with experts, in the model's order."""
    by_name = {(one.module, one.name): one for one in observed}
    result: list[Load] = []
    for one in observed:
        total = sum(one.mean)
        if one.name != ROWS or not total:
            continue
        dropped, buffer = by_name.get((one.module, DROPPED)), by_name.get((one.module, BUFFER))
        shares, least, most = (
            tuple(count / total for count in counts) for counts in (one.mean, one.least, one.most)
        )
        lost = None if dropped is None else sum(dropped.mean) / total
        room = None if buffer is None else buffer.most[0]
        result.append(Load(one.module, one.steps, total, shares, least, most, lost, room))
    return tuple(result)


def load_grid(run: ObservedRun) -> Grid | None:
    """A row for each layer with experts; None for a model without."""
    loads = loads_of(run.end)
    if not loads:
        return None
    of_all_steps = {load.module: load for load in loads_of(run.all)}
    rows = []
    for load in loads:
        without = ", ".join(map(str, load.without[:MOST_NAMED]))
        if len(load.without) > MOST_NAMED:
            without += f" and {len(load.without) - MOST_NAMED} more"
        buffer = of_all_steps[load.module].buffer
        fewest, most = min(load.shares), max(load.shares)
        rows.append(
            (
                load.module,
                f"{format_share(fewest)} ({load.shares.index(fewest)})",
                f"{format_share(most)} ({load.shares.index(most)})",
                f"{format_share(min(load.least))} to {format_share(max(load.most))}",
                without or "-",
                "-" if load.dropped is None else format_share(load.dropped),
                "-" if buffer is None else f"{buffer:.2f}",
            )
        )
    head = ("", "fewest", "most", "in single steps", "none", "dropped", "buffer")
    even = " or ".join(dict.fromkeys(format_share(1 / len(load.shares)) for load in loads))
    caption = (
        f"Shares of the rows (a token's choices) that a layer's router sends; {even} would be even. fewest, "
        "most: in the mean of the steps, with the expert's number. none: experts without any."
    )
    if any(load.dropped is not None for load in loads):
        caption += " dropped: rows that found no room."
    if any(load.buffer is not None for load in of_all_steps.values()):
        caption += (
            " buffer: rows for the rank that was sent most, over the mean, in any of "
            f"{loads_of(run.all)[0].steps} steps; an ep_buffer of as much has room for them."
        )
    return Grid(f"Load by expert, steps {run.first} to {run.last}", head, rows, (0, 4), caption)


def others_grid(run: ObservedRun) -> Grid | None:
    """All other metrics: of each the mean of the steps, and how far its elements were from it; None for a
    model without."""
    known = {load.module for load in loads_of(run.end)}
    rows = [
        (
            f"{one.module} {one.name}".strip(),
            str(len(one.mean)),
            f"{sum(one.mean) / len(one.mean):.4g}",
            f"{min(one.least):.4g}",
            f"{max(one.most):.4g}",
        )
        for one in run.end
        if one.mean and not (one.module in known and one.name in (ROWS, DROPPED, BUFFER))
    ]
    if not rows:
        return None
    head = ("", "elements", "mean", "least", "most")
    return Grid(f"What the model lets see, steps {run.first} to {run.last}", head, rows)


def dropped_words(observed: Sequence[Observed]) -> str:
    """`1.2% of the rows for experts found no room`, of all layers; "" where none were dropped."""
    loads = loads_of(observed)
    rows = sum(load.rows for load in loads)
    dropped = sum((load.dropped or 0.0) * load.rows for load in loads)
    return f"{format_share(dropped / rows)} of the rows for experts found no room" if dropped else ""


def load_findings(run: ObservedRun) -> list[str]:
    """What is worth saying of loads, in sentences."""
    loads = loads_of(run.end)
    if not loads:
        return []
    worst = max(loads, key=lambda load: max(load.shares) * len(load.shares))
    most = max(worst.shares)
    times, busiest = most * len(worst.shares), worst.shares.index(most)
    said = [
        f"The busiest expert is number {busiest} of {worst.module}: {times:.2f} times the even share, "
        f"in the mean of the steps {run.first} to {run.last}."
    ]
    idle = [load for load in loads if load.without]
    if idle:
        count = sum(len(load.without) for load in idle)
        first = f"number {idle[0].without[0]} of {idle[0].module}"
        said.append(
            f"{count} experts got no rows, as {first}." if count > 1 else f"Expert {first} got no rows."
        )
    for words, where in (
        (dropped_words(run.end), f"In the steps {run.first} to {run.last}"),
        (dropped_words(run.evaluation), "In the last evaluation"),
    ):
        if words:
            said.append(f"{where} {words}, and were dropped.")
    return said


WIDTH_PX = 1200
LOSS_HEIGHT_PX = 300
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 64, 24, 34, 44
"""Margins of the loss."""
TICKS = 6

MORE, LESS = "213,94,0", "0,114,178"
"""Colours of an expert above its even share, and below it."""
MOST_SHARES = 32
"""Experts of a layer up to which cells have their shares written into them."""


def points_of(metrics: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
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
        f'<svg class="curve" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {LOSS_HEIGHT_PX}" '
        f'width="{WIDTH_PX}" height="{LOSS_HEIGHT_PX}" role="img" aria-label="Loss over steps">',
        f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{LOSS_HEIGHT_PX - 1}" '
        'rx="10"/>',
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
        f'<circle class="kept" cx="{x(s):.1f}" cy="{y(v):.1f}" r="3.2">'
        f"<title>step {s:g}: {v:.4g}</title></circle>"
        for s, v in held_out
    ]
    out.append(f'<line class="train" x1="{LEFT_PX}" x2="{LEFT_PX + 18}" y1="18" y2="18"/>')
    out.append(_text(LEFT_PX + 24, 22, "training loss", "start"))
    if held_out:
        out.append(f'<circle class="kept" cx="{LEFT_PX + 128}" cy="18" r="3.2"/>')
        out.append(_text(LEFT_PX + 138, 22, "held-out loss", "start"))
    return "\n".join([*out, "</svg>"])


def loads_table(run: ObservedRun) -> str | None:
    """A row for each layer and a cell for each expert, as HTML; None for a model without experts."""
    loads = loads_of(run.end)
    if not loads:
        return None
    experts = max(len(load.shares) for load in loads)

    def cell(load: Load, expert: int) -> str:
        share, even = load.shares[expert], 1.0 / len(load.shares)
        strength, colour = min(1.0, abs(share / even - 1.0)), MORE if share > even else LESS
        tip = (
            f"{load.module}, expert {expert}: {format_share(share)} of the rows, "
            f"{format_share(load.least[expert])} to {format_share(load.most[expert])} in single steps"
        )
        style = f"background:rgba({colour},{0.75 * strength:.2f})"
        words = format_share(share) if experts <= MOST_SHARES else ""
        return f'<td title="{escape(tip)}" style="{style}">{words}</td>'

    head = "".join(f"<th>{expert}</th>" for expert in range(experts))
    rows = [
        f"<tr><td>{escape(load.module)}</td>{''.join(cell(load, at) for at in range(len(load.shares)))}</tr>"
        for load in loads
    ]
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
