"""Schedules for the eye and for other programs: figures, JSON, and a timeline (`stretto.report` draws it)."""

from __future__ import annotations

import json
import math
from typing import Any

from stretto.ir.action import Schedule
from stretto.ir.serialize import CODEC
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.schedule.search import Searched
from stretto.schedule.timing import ScheduleTiming

JSON_VERSION = 1
"""Version of the JSON form; it changes when a reader of the old form would misread the new one."""


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
                for a in slot.actions:
                    of = (a.stage, a.phase, a.microbatch)
                    spans.append(Span(rank, COMPUTE_LANE, SpanKind.COMPUTE, str(a), start, end, *of))
            until = end
        if timing.makespan > until:
            spans.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "", until, timing.makespan))
    return Timeline(schedule.family, schedule.ranks, timing.makespan, tuple(spans), (0,) * schedule.ranks)


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
    document: dict[str, Any] = {"format": "stretto-schedule", "version": JSON_VERSION}
    document |= CODEC.form(Schedule).write(schedule)
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
