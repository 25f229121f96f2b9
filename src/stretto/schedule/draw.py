"""Schedules for the eye and for other programs: text, JSON, and a timeline (`stretto.report` draws it)."""

from __future__ import annotations

import json
import math
from typing import Any

from stretto.ir.action import Action, Schedule
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.schedule.search import Searched
from stretto.schedule.timing import ScheduleTiming

JSON_VERSION = 1
"""Version of the JSON form; it changes when a reader of the old form would misread the new one."""

MAX_COLUMNS_PER_ACTION = 24
"""Assumed: the widest an average action is drawn in text, where a phase is so short that its label would need
more. The short phase then loses its label, and the drawing stays readable."""


def to_ascii(schedule: Schedule, timing: ScheduleTiming, *, width: int | None = None) -> str:
    """Draw the schedule as text, one row a rank; dots are idle time.

    Columns are proportional to time, and the first line is the time axis. Drawings wider than `width` columns
    are cut into bands; None does not cut. A label is phase and microbatch, with the stage in front where a
    rank holds several.
    """
    names = ["time", *(_rank_name(schedule, rank) for rank in range(schedule.ranks))]
    rows = _rows(schedule, timing)
    margin = max(len(name) for name in names) + 2
    total = max(len(row) for row in rows)
    band = total if width is None else max(width - margin, 20)
    lines: list[str] = []
    for left in range(0, max(total, 1), band):
        if lines:
            lines.append("")
        for name, row in zip(names, rows, strict=True):
            lines.append((name.ljust(margin) + row[left : left + band]).rstrip())
    return "\n".join(lines) + "\n"


def to_timeline(schedule: Schedule, timing: ScheduleTiming) -> Timeline:
    """The timed schedule as a timeline of actions and idle time, in the unit that was put in."""
    spans: list[Span] = []
    for rank, order in enumerate(schedule.orders):
        until = 0.0
        for slot in order:
            start, end = timing.start[slot.actions[0]], timing.end[slot.actions[0]]
            if start > until:
                spans.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "", until, start))
            if end > start:
                spans += [
                    Span(
                        rank,
                        COMPUTE_LANE,
                        SpanKind.COMPUTE,
                        str(a),
                        start,
                        end,
                        a.stage,
                        a.phase,
                        a.microbatch,
                    )
                    for a in slot.actions
                ]
            until = end
        if timing.makespan > until:
            spans.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "", until, timing.makespan))
    return Timeline(schedule.family, schedule.ranks, timing.makespan, tuple(spans), (0,) * schedule.ranks)


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


def describe_timing(timing: ScheduleTiming) -> str:
    """The timing's figures as a few lines of text; times are in the unit that was put in."""
    live = " ".join(str(count) for count in timing.peak_live)
    return (
        f"makespan                     {timing.makespan:.10g}\n"
        f"cost of the longest rank     {timing.cost:.10g}\n"
        f"bubble rate                  {timing.bubble_rate:.4f}\n"
        f"live microbatches, by stage  {live}\n"
    )


def describe_search(searched: Searched) -> str:
    """What a search has found, as a few lines of text, in the same form and unit."""
    times: dict[str, float] = {}
    for one in searched.found:
        times.setdefault(one.schedule.family, one.time)
    return (
        f"chosen                       {searched.best.schedule.family}\n"
        f"lower bound                  {searched.bound:.10g}\n"
        f"gap                          {100 * searched.gap:.2f} %\n"
        f"tried                        {', '.join(f'{name} {time:.6g}' for name, time in times.items())}\n"
    )


def to_json(schedule: Schedule, timing: ScheduleTiming | None = None) -> str:
    """The schedule, and its timing if there is one, as JSON; equal input gives equal text.

    Orders are lists of tokens, one list a rank. Under "timing", times are in the unit that was put in, and
    "actions" lists [rank, token, start, end] in order of rank and start.
    """
    document: dict[str, Any] = {
        "format": "stretto-schedule",
        "version": JSON_VERSION,
        "family": schedule.family,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "orders": [[str(slot) for slot in order] for order in schedule.orders],
    }
    if timing is not None:
        times = timing.times
        document["timing"] = {
            "times": {
                "F": times.forward,
                "I": times.input_gradient,
                "W": times.weight_gradient,
                "message": times.message,
            },
            "makespan": timing.makespan,
            "cost": timing.cost,
            "bubble_rate": timing.bubble_rate,
            "peak_live": list(timing.peak_live),
            "actions": [
                [rank, str(action), timing.start[action], timing.end[action]]
                for rank in range(schedule.ranks)
                for action in schedule.actions(rank)
            ],
        }
    return json.dumps(document, indent=1) + "\n"


def _rank_name(schedule: Schedule, rank: int) -> str:
    """The rank, and its stages where they are not simply the rank's own number."""
    stages = schedule.stages_of(rank)
    return f"rank {rank}" if stages == (rank,) else f"rank {rank} (stage {','.join(map(str, stages)) or '-'})"


def _labels(schedule: Schedule) -> list[list[str]]:
    """The text of every slot of every rank; overlapped actions are joined by a plus sign."""
    return [
        ["+".join(action_label(schedule, rank, action) for action in slot.actions) for slot in order]
        for rank, order in enumerate(schedule.orders)
    ]


def _rows(schedule: Schedule, timing: ScheduleTiming) -> list[str]:
    """The time axis and one row a rank, with equally many columns for equal times everywhere."""
    labels = _labels(schedule)
    boxes: list[list[tuple[float, float, str]]] = []
    for order, row in zip(schedule.orders, labels, strict=True):
        boxes.append(
            [(timing.start[s.actions[0]], timing.end[s.actions[0]], text) for s, text in zip(order, row)]
        )
    sized = [(end - start, len(text) + 1) for row_ in boxes for start, end, text in row_ if end > start]
    if not sized:
        return ["0", *("" for _ in schedule.orders)]
    average = sum(length for length, _ in sized) / len(sized)
    columns_per_unit = min(max(need / length for length, need in sized), MAX_COLUMNS_PER_ACTION / average)
    total = _column(timing.makespan * columns_per_unit)

    rows = [_axis(timing.makespan, columns_per_unit, total)]
    for row_ in boxes:
        canvas = ["."] * total
        for start, end, text in row_:
            left, right = _column(start * columns_per_unit), _column(end * columns_per_unit)
            room = right - left - 1  # the last column stays blank, so that neighbours can be distinguished
            drawn = text.ljust(room, "-") if len(text) <= room else "-" * room
            canvas[left:right] = (drawn + " ")[: right - left]
        rows.append("".join(canvas))
    return rows


def _column(place: float) -> int:
    """The nearest column, halves always up: with Python's `round`, halves to even, a box that begins and ends
    on halves could lose a column and with it its label."""
    return math.floor(place + 0.5 + 1e-9)


def _axis(makespan: float, columns_per_unit: float, total: int) -> str:
    """Round times, far enough from each other that their figures do not touch."""
    line = [" "] * (total + 12)
    for time in tick_times(makespan, 12 / columns_per_unit):
        left = round(time * columns_per_unit)
        text = f"{time:.10g}"
        line[left : left + len(text)] = text
    return "".join(line).rstrip()
