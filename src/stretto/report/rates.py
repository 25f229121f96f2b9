"""How fast a rank computes: FLOPs, their share of the device's peak (MFU, HFU), and tokens a second a device.

Reads `stretto.ir.work` and what a run's summary says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.ir.timeline import Timeline
from stretto.ir.work import Work
from stretto.report.grid import Grid
from stretto.report.words import KINDS, format_flops, format_share

PER_S = "_per_s"
"""How the summary's key ends of what a run gets through in a second: tokens, samples."""


def rates_grid(
    work: Work, timelines: Sequence[Timeline], world: int, summary: Mapping[str, Any] | None = None
) -> Grid | None:
    """A column a timeline; None for a step without arithmetic that is counted. summary: of a run, whose speed
    stands under what was measured."""
    shown = [timeline for timeline in timelines if timeline.step_us]
    if not work.flops or not shown:
        return None

    def row(name: str, cell: Callable[[float], str]) -> tuple[str, ...]:
        return (name, *(cell(timeline.step_us) for timeline in shown))

    flops = work.flops + work.again_flops
    rows = [
        row("FLOPs of a rank in a step", lambda _: format_flops(work.flops)),
        *([row("  computed again", lambda _: format_flops(work.again_flops))] if work.again_flops else []),
        row("rate of a rank", lambda us: f"{format_flops(flops / us * 1e6)}/s"),
    ]
    if work.peak is not None:
        rows.append(row("MFU", lambda us: format_share(work.mfu(us) or 0.0)))
        if work.again_flops:
            rows.append(row("HFU", lambda us: format_share(work.hfu(us) or 0.0)))
    for key, value in (summary or {}).items():
        if key.endswith(PER_S) and isinstance(value, int | float):
            unit = key.removesuffix(PER_S)
            for name, speed in ((f"{unit} a second", value), (f"{unit} a second a device", value / world)):
                told = (f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" for _ in shown)
                rows.append((name, *(w if t.source == "measured" else "-" for w, t in zip(told, shown))))
    head = ("", *(KINDS.get(timeline.source, timeline.source) for timeline in shown))
    return Grid("Speed", head, tuple(rows), caption=_caption(work))


def _caption(work: Work) -> str:
    counted = "FLOPs: of the captured graph, by PyTorch's formulas."
    if work.again_flops:
        counted += " Computed again: by recomputation, and scores in the backward of fused attention."
    if work.peak is None:
        return f"{counted} MFU is left out: the device's peak rate is not known (processors have no sheet)."
    again = " HFU: with what is computed again." if work.again_flops else ""
    return (
        f"{counted} MFU: without what is computed again, of a peak of "
        f"{format_flops(work.peak.flops_per_us * 1e6)}/s ({work.peak.source}).{again}"
    )
