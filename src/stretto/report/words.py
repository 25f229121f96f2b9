"""Numbers for people: times, bytes, shares. Knows no data of Stretto."""

from __future__ import annotations

from stretto.bounds.words import format_us

KIB = 1024

KINDS = {"simulated": "predicted", "measured": "measured"}
"""A timeline's source -> the word for what it shows."""

__all__ = ["KINDS", "format_bytes", "format_flops", "format_share", "format_us"]


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units: `512 B`, `12.0 MiB`, `1.50 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < KIB - 0.5 or unit == "GiB":
            # Three digits, and never the exponent that `g` would write for a thousand.
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 999.5 else f"{size:.3g} {unit}"
        size /= KIB
    raise AssertionError("unreachable")


def format_flops(flops: float) -> str:
    """Floating-point operations: `3.1 GFLOP`."""
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= 0.9995 * size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops:.0f} FLOP"


def format_share(share: float) -> str:
    """A share of a whole: `6.5%`."""
    return f"{100 * share:.1f}%"
