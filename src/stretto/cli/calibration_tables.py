"""What a calibration says of communication, as tables for the terminal. Thin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from stretto.report.grid import Grid

if TYPE_CHECKING:
    from stretto.price.calibration import Calibration


def print_communication(console: Console, found: Calibration) -> None:
    """Collectives and messages, as far as they were measured."""
    if found.collectives:
        Grid(
            "",
            ("collective", "ranks", "apart", "hosts", "1 MiB", "compute loses, 1 MB", "noise"),
            [
                (
                    one.kind,
                    str(one.members),
                    str(one.stride),
                    str(one.hosts),
                    f"{one.cost.curve.us(2**20) / 1000:.2f} ms",
                    f"{one.cost.lost_us(10**6) / 1000:.2f} ms"
                    + (f", {100 * one.cost.slowdown:.0f} %" if one.cost.slowdown else ""),
                    f"{100 * one.spread:.0f} %",
                )
                for one in found.collectives
            ],
        ).print(console)
    if found.links:
        rows = []
        for link in found.links:
            ways = (link.link,) if link.back is None else (link.link, link.back)
            rows.append(
                (
                    f"{link.stride} apart",
                    str(link.hosts),
                    " / ".join(f"{way.latency_us + way.start_us:.0f}" for way in ways) + " us",
                    " / ".join(f"{way.start_us:.0f}" for way in ways) + " us",
                    " / ".join(f"{way.bytes_per_us:.1f}" for way in ways) + " MB/s",
                    f"{link.link.processor_us_per_mb / 1000:.2f} ms",
                    f"{100 * link.spread:.0f} %",
                )
            )
        head = ("messages", "hosts", "latency", "each more", "rate", "compute loses, 1 MB", "noise")
        Grid("", head, rows).print(console)
