"""Tables of a step: its accounts by rank, predicted beside measured, communication, speed (MFU, HFU)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.ir.axes import AXES
from stretto.ir.compared import against, beside_bound, signed
from stretto.ir.costs import Prediction
from stretto.ir.timeline import Span, SpanKind, Timeline, axis_of
from stretto.ir.work import Work
from stretto.report.grid import Grid, format_bytes, format_flops, format_share, format_us, source_word
from stretto.report.ops import OpGroup

_SUM = re.compile(r"^\d+\.\d+$")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communications of one axis and kind. messages: of the full step, over all ranks; exposed: what waits
    for them. total_us, exposed_us: means over ranks, as `Timeline.comm_us` and `Timeline.exposed_us` define
    them: what overlaps in time counts once, so the kinds of an axis may add up to more than the axis."""

    axis: str
    kind: str
    messages: tuple[Span, ...]
    exposed: tuple[Span, ...]
    total_us: float
    exposed_us: float

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.messages)

    @property
    def hidden(self) -> float | None:
        """1 - exposed / total; None when the communication took no time."""
        return 1.0 - self.exposed_us / self.total_us if self.total_us else None


def communication_of(name: str) -> tuple[str, str]:
    """(axis, kind) of what a span is named for: `pp 0>1 e3:0` a message, `tp all_reduce mm_3` all_reduce."""
    axis = axis_of(name)
    word = name.removeprefix(f"{axis} ").split(" ")[0]
    if ">" in word:
        return axis, "message"
    if word.startswith("tied."):
        return axis, "tied gradients"
    made = word.split(".")
    if "unshard" in made:
        return axis, "parameters"
    return axis, "gradients" if "scatter" in made or _SUM.match(word) else word


def traffic_of(
    timeline: Timeline, kind_of: Callable[[str, str], str] = lambda axis, kind: kind
) -> tuple[Traffic, ...]:
    """All communication of a step by axis and kind, in the order of axes, the longest kind first. kind_of:
    what a kind of an axis counts as."""
    spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind in (SpanKind.MESSAGE, SpanKind.EXPOSED):
            axis, kind = communication_of(span.name)
            spans[axis, kind_of(axis, kind)].append(span)
    result: list[Traffic] = []
    for (axis, kind), of in spans.items():
        only = replace(timeline, spans=tuple(of))
        messages = tuple(span for span in of if span.kind is SpanKind.MESSAGE)
        exposed = tuple(span for span in of if span.kind is SpanKind.EXPOSED)
        exposed_us = only.exposed_us.get(axis, 0.0)
        result.append(Traffic(axis, kind, messages, exposed, only.comm_us[axis], exposed_us))
    return tuple(sorted(result, key=lambda t: (AXES.index(t.axis), -t.total_us, t.kind)))


def axes_of(timeline: Timeline) -> tuple[Traffic, ...]:
    """All communication of a step by axis; the kind is `all`."""
    return traffic_of(timeline, lambda axis, kind: "all")


def summary_grid(timeline: Timeline, prediction: Prediction) -> Grid:
    """The simulated step: time, exposed by axis, bubble, bound and gap."""
    step_us, bubble_us = timeline.step_us, _mean(prediction.bubble_us)
    mean = f"(mean of the {timeline.counted})"
    _, parts = prediction.fullest()
    rows = [("step", format_us(step_us), "")]
    for axis, us in sorted(timeline.exposed_us.items()):
        rows.append((f"exposed, {axis} {mean}", format_us(us), _share(us, step_us)))
    rows.append((f"bubble {mean}", format_us(bubble_us), _share(bubble_us, step_us)))
    peak_bytes = max(prediction.peak_bytes, default=0)
    rows.append((f"peak memory (highest {timeline.counted[:-1]})", format_bytes(peak_bytes), ""))
    rows += [(f"  of it {part}", format_bytes(nbytes), "") for part, nbytes in parts.items()]
    if prediction.bound_us:
        rows.append(("lower bound", format_us(prediction.bound_us), ""))
        rows.append(("gap to the bound", beside_bound(prediction.step_us, prediction.bound_us), ""))
    return Grid("The step", ("", source_word(timeline.source), "of the step"), rows)


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
        f"By {timeline.counted[:-1]}, {source_word(timeline.source)}",
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
        words = f"{name} (mean of the {measured.counted})"
        rows.append(_times(words, _mean(predicted), _mean(measured.by_rank(kind))))
        by_axis = prediction.exposed_axis_us if kind is SpanKind.EXPOSED else {}
        axes = [axis for axis in by_axis if any(by_axis[axis]) or measured.exposed_us.get(axis)]
        for axis in axes if len(axes) > 1 else ():
            # By axis only where there are several: for one it is the row above again.
            rows.append(_times(f"  of it {axis}", _mean(by_axis[axis]), measured.exposed_us.get(axis, 0.0)))
    for rank, peak in enumerate(measured.peak_bytes):
        expected = prediction.peak_bytes[rank] if rank < len(prediction.peak_bytes) else 0
        sizes = format_bytes(expected), format_bytes(peak)
        rows.append((f"peak memory, {measured.who(rank)}", *sizes, signed(against(peak, expected))))
    bound_us = prediction.bound_us
    if bound_us:
        rows.append(("lower bound", format_us(bound_us), format_us(bound_us), ""))
        gaps = [beside_bound(step_us, bound_us) for step_us in (prediction.step_us, measured.step_us)]
        rows.append(("gap to the bound", gaps[0], gaps[1], ""))
    caption = "difference: measured against predicted; + is longer, or more, than predicted"
    head = ("", "predicted", "measured", "difference")
    return Grid("Measured against predicted", head, rows, caption=caption)


def traffic_grid(timelines: Sequence[Timeline]) -> Grid:
    """Communication by axis, and by kind within each: number and bytes in the step over all ranks; for every
    timeline its time and exposed time (means over ranks), and the hidden fraction."""
    result = [{(t.axis, t.kind): t for t in (*axes_of(one), *traffic_of(one))} for one in timelines]
    keys = dict.fromkeys(key for one in result for key in one)
    rows = []
    for axis in dict.fromkeys(axis for axis, _ in keys):
        for key in [(axis, "all"), *(k for k in keys if k[0] == axis and k[1] != "all")]:
            known = next(one[key] for one in result if key in one)
            row = [axis if key[1] == "all" else f"  {key[1]}"]
            row += [f"{len(known.messages):,}", format_bytes(known.nbytes)]
            for one in result:
                if key in one:
                    hidden = one[key].hidden
                    row += [format_us(one[key].total_us), format_us(one[key].exposed_us)]
                    row.append("-" if hidden is None else format_share(hidden))
                else:
                    row += ["-", "-", "-"]
            rows.append(tuple(row))
    times = f"times: mean of the {timelines[0].counted}"
    figures = ("time", "exposed", "hidden")
    if len(timelines) == 1:
        title = f"Communication, {source_word(timelines[0].source)} ({times})"
        return Grid(title, ("", "number", "bytes", *figures), rows)
    each = (f"{what}, {source_word(timeline.source)}" for timeline in timelines for what in figures)
    return Grid(f"Communication ({times})", ("", "number", "bytes", *each), rows)


def costliest_grid(groups: Sequence[OpGroup], *, reads: bool = False, known: bool = False) -> Grid:
    """The costliest ops: what they cost over all stages and microbatches, and how fast they work.

    reads: list what they read as well. known: list how their times are known. Both take room."""
    rows = []
    for group in groups:
        rate = format_flops(group.flops / group.total_us * 1e6) + "/s" if group.flops else "-"
        row = [group.target.removeprefix("aten.").removesuffix(".default"), group.phases, f"{group.calls:,}"]
        row += [format_us(group.each_us), format_us(group.total_us), format_share(group.share)]
        row += [rate, *([group.source] if known else [])]
        rows.append(
            (*row, _plain(f"{group.reads} → {group.makes}".strip()) if reads else _short(group.makes))
        )
    head = ["", "phase", "calls", "each", "total", "share", "rate", *(["known"] if known else [])]
    head.append("reads → makes" if reads else "makes")
    words = (0, *range(7, len(head)))
    return Grid("Costliest ops (all stages and microbatches)", tuple(head), rows, words)


def _plain(shapes: str) -> str:
    return re.sub(r"\{[\d,]*\}", "", shapes)


def _short(made: str) -> str:
    """The first shape only: enough to distinguish ops in a narrow table."""
    first, _, rest = _plain(made).partition(" ")
    return first + (" …" if rest else "")


def _times(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    return name, format_us(predicted), format_us(measured), signed(against(measured, predicted))


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0


def _share(part: float, total: float) -> str:
    return format_share(part / total) if total else "-"


PER_S = "_per_s"
"""How the summary's key ends of what a run gets through in a second: tokens, samples."""


def rates_grid(
    work: Work, timelines: Sequence[Timeline], world: int, summary: Mapping[str, Any] | None = None
) -> Grid | None:
    """A column a timeline; None for a step without arithmetic that is counted. summary: of a run, whose speed
    is under what was measured."""
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
                words = f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"
                rows.append((name, *(words if t.source == "measured" else "-" for t in shown)))
    head = ("", *(source_word(timeline.source) for timeline in shown))
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
