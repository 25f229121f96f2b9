"""Tables: a step's accounts by rank, and the predicted beside the measured, for terminal and page alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stretto.ir.compared import against, beside_bound, signed
from stretto.ir.costs import Prediction
from stretto.ir.timeline import SpanKind, Timeline
from stretto.report.costliest import OpGroup
from stretto.report.grid import Grid
from stretto.report.traffic import axes_of, traffic_of
from stretto.report.words import KINDS, format_bytes, format_flops, format_share, format_us


def summary_grid(timeline: Timeline, prediction: Prediction) -> Grid:
    """What the simulation says of the whole step: time, exposed by axis, bubble, bound and gap."""
    step_us = timeline.step_us
    bubble_us = _mean(prediction.bubble_us)
    _, parts = prediction.fullest()
    rows = [("step", format_us(step_us), "")]
    rows += [
        (f"exposed, {axis} (mean of the {timeline.counted})", format_us(us), _share(us, step_us))
        for axis, us in sorted(timeline.exposed_us.items())
    ]
    rows += [
        (f"bubble (mean of the {timeline.counted})", format_us(bubble_us), _share(bubble_us, step_us)),
        (
            f"peak memory (highest {timeline.counted[:-1]})",
            format_bytes(max(prediction.peak_bytes, default=0)),
            "",
        ),
        *((f"  of it {part}", format_bytes(nbytes), "") for part, nbytes in parts.items()),
    ]
    if prediction.bound_us:
        rows.append(("lower bound", format_us(prediction.bound_us), ""))
        rows.append(("gap to the bound", beside_bound(prediction.step_us, prediction.bound_us), ""))
    return Grid("The step", ("", KINDS.get(timeline.source, timeline.source), "of the step"), tuple(rows))


def ranks_grid(timeline: Timeline) -> Grid:
    """The accounts of every rank."""
    totals = [timeline.by_rank(kind) for kind in (SpanKind.COMPUTE, SpanKind.EXPOSED, SpanKind.BUBBLE)]
    rows = tuple(
        (
            timeline.who(rank),
            *(f"{format_us(us[rank])} ({_share(us[rank], timeline.step_us)})" for us in totals),
            format_bytes(timeline.peak_bytes[rank]) if rank < len(timeline.peak_bytes) else "-",
        )
        for rank in range(timeline.ranks)
    )
    return Grid(
        f"By {timeline.counted[:-1]}, {KINDS.get(timeline.source, timeline.source)}",
        ("", "compute", "exposed", "bubble", "peak memory"),
        rows,
    )


def comparison_grid(prediction: Prediction, measured: Timeline) -> Grid:
    """Measured against predicted: the step, its accounts as means over ranks, and peak memory by rank.

    Differences are of the measured against the predicted (`stretto.ir.compared`)."""
    rows = [_times("step", prediction.step_us, measured.step_us)]
    for name, predicted, kind in (
        ("compute", prediction.compute_us, SpanKind.COMPUTE),
        ("exposed communication", prediction.exposed_us, SpanKind.EXPOSED),
        ("bubble", prediction.bubble_us, SpanKind.BUBBLE),
    ):
        rows.append(
            _times(
                f"{name} (mean of the {measured.counted})", _mean(predicted), _mean(measured.by_rank(kind))
            )
        )
        by_axis = prediction.exposed_axis_us if kind is SpanKind.EXPOSED else {}
        axes = [axis for axis in by_axis if any(by_axis[axis]) or measured.exposed_us.get(axis)]
        for axis in axes if len(axes) > 1 else ():
            # By axis only where there are several: for one it is the row above again.
            rows.append(_times(f"  of it {axis}", _mean(by_axis[axis]), measured.exposed_us.get(axis, 0.0)))
    for rank, held in enumerate(measured.peak_bytes):
        expected = prediction.peak_bytes[rank] if rank < len(prediction.peak_bytes) else 0
        change = signed(against(held, expected))
        rows.append(
            (f"peak memory, {measured.who(rank)}", format_bytes(expected), format_bytes(held), change)
        )
    bound_us = prediction.bound_us
    if bound_us:
        rows.append(("lower bound", format_us(bound_us), format_us(bound_us), ""))
        gaps = [beside_bound(step_us, bound_us) for step_us in (prediction.step_us, measured.step_us)]
        rows.append(("gap to the bound", gaps[0], gaps[1], ""))
    caption = "difference: measured against predicted; + is longer, or more, than predicted"
    head = ("", "predicted", "measured", "difference")
    return Grid("Measured against predicted", head, tuple(rows), caption=caption)


def traffic_grid(timelines: Sequence[Timeline]) -> Grid:
    """Communication by axis, and by kind within each: number and bytes in the step over all ranks; for every
    timeline its time and exposed time (means over ranks), and the hidden fraction."""
    found = []
    for timeline in timelines:
        found.append({(t.axis, t.kind): t for t in (*axes_of(timeline), *traffic_of(timeline))})
    keys = dict.fromkeys(key for one in found for key in one)
    axes = dict.fromkeys(axis for axis, _ in keys)
    rows = []
    for axis in axes:
        for key in [(axis, "all"), *(k for k in keys if k[0] == axis and k[1] != "all")]:
            known = next(one[key] for one in found if key in one)
            row = [axis if key[1] == "all" else f"  {key[1]}"]
            row += [f"{known.count:,}", format_bytes(known.nbytes)]
            for one in found:
                if key in one:
                    hidden = one[key].hidden
                    row += [format_us(one[key].total_us), format_us(one[key].exposed_us)]
                    row.append("-" if hidden is None else format_share(hidden))
                else:
                    row += ["-", "-", "-"]
            rows.append(tuple(row))
    if len(timelines) == 1:
        head: tuple[str, ...] = ("", "number", "bytes", "time", "exposed", "hidden")
        title = (
            f"Communication, {KINDS.get(timelines[0].source, timelines[0].source)} "
            f"(times: mean of the {timelines[0].counted})"
        )
    else:
        names = [KINDS.get(t.source, t.source) for t in timelines]
        each = (f"{what}, {name}" for name in names for what in ("time", "exposed", "hidden"))
        head = ("", "number", "bytes", *each)
        title = f"Communication (times: mean of the {timelines[0].counted})"
    return Grid(title, head, tuple(rows))


def costliest_grid(found: Sequence[OpGroup], *, reads: bool = False) -> Grid:
    """The costliest ops: what they cost over all stages and microbatches, and how fast they work.

    reads: say what they read as well, which takes room."""
    rows = []
    for group in found:
        rate = format_flops(group.flops / group.total_us * 1e6) + "/s" if group.flops else "-"
        row = [group.target.removeprefix("aten.").removesuffix(".default"), group.phases, f"{group.calls:,}"]
        row += [format_us(group.total_us / group.calls), format_us(group.total_us), format_share(group.share)]
        rows.append((*row, rate, _plain(f"{group.shapes} → {group.made}") if reads else _short(group.made)))
    head = ("", "phase", "calls", "each", "total", "share", "rate", "reads → makes" if reads else "makes")
    return Grid("Costliest ops (all stages and microbatches)", head, tuple(rows), (0, len(head) - 1))


def _plain(shapes: str) -> str:
    """Shapes without their layout."""
    return re.sub(r"\{[\d,]*\}", "", shapes)


def _short(made: str) -> str:
    """The first shape only: enough to distinguish ops in a narrow table."""
    first, _, rest = _plain(made).partition(" ")
    return first + (" …" if rest else "")


def _times(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    return name, format_us(predicted), format_us(measured), signed(against(measured, predicted))


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(part: float, whole: float) -> str:
    return format_share(part / whole) if whole else "-"
