"""Rows of a race of plans: medians, what was exposed, and what share of another's exposed time was hidden.

*Exposed* is the time in which a place's compute lane waits for communication that counts. A system that waits
for each at once exposes all the time that it takes. *Hidden* is the share of that which another does not
expose.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.race import Times
from stretto.ir.timeline import Span, SpanKind, Timeline

Row = dict[str, Any]

Counts = Callable[[Span], bool]
"""Whether what a span waits for is communication that counts."""


def time_row(name: str, found: Times, bases_s: Mapping[str, float], bound_s: float) -> Row:
    """A system's median step: over those of others, by their names, and over the bound."""
    return {
        "system": name,
        "step_s": found.median_s,
        **{f"speedup_vs_{base}": base_s / found.median_s for base, base_s in bases_s.items()},
        "ratio_to_bound": found.median_s / bound_s,
        "rounds_s": list(found.rounds),
    }


def exposed_s(lines: Sequence[Timeline], counts: Counts) -> list[float]:
    """By place, the median over steps."""
    return [statistics.median(column) / 1e6 for column in zip(*(_exposed_us(line, counts) for line in lines))]


def _exposed_us(line: Timeline, counts: Counts) -> list[float]:
    found = [0.0] * line.ranks
    for span in line.spans:
        if span.kind is SpanKind.EXPOSED and counts(span):
            found[span.rank] += span.duration_us
    return found


def hidden(mine_s: Sequence[float], all_s: Sequence[float]) -> list[float | None]:
    """By place, the share of what waits at once expose (`all_s`) that is not exposed; None where that is
    nothing."""
    return [1.0 - mine / all_ if all_ else None for mine, all_ in zip(mine_s, all_s, strict=True)]


def versions() -> Row:
    """Of what ran."""
    return {"torch": torch.__version__, "python": platform.python_version()}
