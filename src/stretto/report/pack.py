"""What the page's drawing needs, packed small: columns of numbers, texts once, compressed.

1. Times are full ticks of `TICK_US`, and a span's start counts from the end of the one before it, so that
   what repeats from microbatch to microbatch is equal text, which compression finds.
2. The ops of a window are written once; spans name the run of a window that they belong to.
3. Everything is one JSON object, gzip, base64: browsers unpack it themselves (`DecompressionStream`).

`page/data.js` reads this.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, Timeline
from stretto.report.detail import (
    WindowRun,
    op_category,
    op_data,
    rows_of,
    runs_of,
    span_category,
    specs_of,
    window_ops,
)

TICK_US = 0.01
"""Finer than any clock that measures ops, and small enough that integers are exact."""

CATEGORIES = ("F", "I", "W", "B", "R", "S", "exposed", "bubble", "message")


Texts = Callable[[str], int]
"""A text's number; each is there once."""


def packed(timelines: Sequence[Timeline], titles: Sequence[str], plan: Plan | None) -> str:
    """The drawing's data as base64 text. Without a plan there are no ops; equal input gives equal text."""
    raw = json.dumps(drawing_data(timelines, titles, plan), separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode()


def drawing_data(timelines: Sequence[Timeline], titles: Sequence[str], plan: Plan | None) -> dict[str, Any]:
    """The data itself, before it is compressed."""
    numbers: dict[str, int] = {}

    def texts(text: str) -> int:
        return numbers.setdefault(text, len(numbers))

    data: dict[str, Any] = {
        "tick_us": TICK_US,
        "categories": CATEGORIES,
        "ops": {} if plan is None else _ops(plan, texts),
        "edges": [] if plan is None else [texts(f"{e.value} {e.spec}") for e in plan.job.edges],
        "source": "" if plan is None else plan.costs.source,
        "timelines": [
            _timeline(timeline, title, plan, texts) for timeline, title in zip(timelines, titles, strict=True)
        ],
    }
    data["texts"] = list(numbers)
    return data


# --- step 2: ops, once a window ----------------------------------------------------------------------


def _ops(plan: Plan, texts: Texts) -> dict[str, Any]:
    """Columns of all ops, and for every window its first op's number and how many there are."""
    specs = specs_of(plan.job)
    columns: dict[str, list[int]] = defaultdict(list)
    windows: dict[str, list[int]] = {}
    for name, ops in window_ops(plan).items():
        windows[name] = [len(columns["name"]), len(ops)]
        for row in ops:
            for key, value in op_data(row.op, specs).items():
                columns[key].append(texts(value) if isinstance(value, str) else value)
            columns["category"].append(CATEGORIES.index(op_category(row.op, row.phase)))
            columns["us"].append(_ticks(row.us))
    return {"windows": windows, **columns}


# --- step 1: spans -----------------------------------------------------------------------------------


def _timeline(timeline: Timeline, title: str, plan: Plan | None, texts: Texts) -> dict[str, Any]:
    runs = runs_of(plan, timeline) if plan is not None else ((),) * timeline.ranks
    return {
        "title": title,
        "source": timeline.source,
        "ranks": timeline.ranks,
        "names": [timeline.who(rank) for rank in range(timeline.ranks)],
        "step": _ticks(timeline.step_us),
        "peak": list(timeline.peak_bytes),
        "memory": [_steps(steps) for steps in timeline.memory],
        "runs": [[[run.window, *run.microbatches] for run in of_rank] for of_rank in runs],
        "lanes": [
            _lane(rank, row, spans, texts, runs[rank] if row == COMPUTE_LANE else ())
            for rank, rows in enumerate(rows_of(timeline))
            for row, spans in rows.items()
        ],
    }


def _lane(
    rank: int, row: str, spans: Sequence[Span], texts: Texts, runs: Sequence[WindowRun]
) -> dict[str, Any]:
    run_of = {id(span): number for number, run in enumerate(runs) for span in run.spans}
    starts, ends = [_ticks(span.start_us) for span in spans], [_ticks(span.end_us) for span in spans]
    return {
        "rank": rank,
        "row": row,
        "count": len(spans),
        "start": [start - before for start, before in zip(starts, [0, *ends])],
        "took": [end - start for start, end in zip(starts, ends, strict=True)],
        "category": [CATEGORIES.index(span_category(span)) for span in spans],
        "name": [texts(span.name) for span in spans],
        "microbatch": [-1 if span.microbatch is None else span.microbatch for span in spans],
        "run": [run_of.get(id(span), -1) for span in spans],
        "bytes": [span.nbytes for span in spans],
        "sender": [-1 if span.sender is None else span.sender for span in spans],
        "sent": [
            0 if span.sent_us is None else start - _ticks(span.sent_us)
            for span, start in zip(spans, starts, strict=True)
        ],
    }


def _steps(steps: Sequence[tuple[float, int]]) -> list[list[int]]:
    """Memory as two columns of differences: ticks, bytes."""
    times = [_ticks(at) for at, _ in steps]
    sizes = [nbytes for _, nbytes in steps]
    return [[after - before for before, after in zip([0, *of], of)] for of in (times, sizes)]


def _ticks(us: float) -> int:
    return round(us / TICK_US)
