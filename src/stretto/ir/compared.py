"""Figures beside those that they are compared with, one way round everywhere: what was measured against what
was predicted (or planned), a step against its bound.

A difference is a share of what is compared with: +0.05 is five percent more, or slower, than was predicted.
Numbers and words only.
"""

from __future__ import annotations

SHOWN = 0.0005
"""A difference below this share is shown as none: tables give a tenth of a percent."""


def against(measured: float, predicted: float) -> float | None:
    """How far `measured` is from `predicted`; None when there is nothing to compare with."""
    return measured / predicted - 1.0 if predicted else None


def signed(difference: float | None, absent: str = "-") -> str:
    """A difference in a table: `+3.1%`."""
    return absent if difference is None else f"{100 * difference:+z.1f}%"


def slower(difference: float) -> str:
    """A difference of times in a sentence: `3.1% slower than`, `as long as`."""
    if abs(difference) < SHOWN:
        return "as long as"
    return f"{100 * abs(difference):.1f}% {'slower' if difference > 0 else 'faster'} than"


def beside_bound(step_us: float, bound_us: float) -> str:
    """How far a step is from its lower bound: `3.1%` above it, `none`, or `0.4% below the bound`, in words,
    as costs that are right let no step be there."""
    gap = against(step_us, bound_us)
    if gap is None:
        return "-"
    if abs(gap) < SHOWN:
        return "none"
    return f"{100 * gap:.1f}%" if gap > 0 else f"{-100 * gap:.1f}% below the bound"
