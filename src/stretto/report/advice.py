"""Why communication is exposed, and what would help: a row an axis, sequence parallelism apart from tp.

A reason is read off a timeline and its plan, in the order of `_why`: the first that explains half of what is
exposed. What helps against it is told with the plan's own numbers (`stretto.report.help`). Reads spans by
their names, so that predicted and measured steps are judged alike.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from stretto.ir.axes import AXES, PIPELINE, TENSOR
from stretto.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.ir.transfers import SUM, message_us
from stretto.report.findings import LEAST_SHARE
from stretto.report.grid import Grid
from stretto.report.help import SEQUENCE, Reason, help_for
from stretto.report.traffic import Traffic, communication_of, traffic_among
from stretto.report.words import format_bytes, format_share, format_us

OF_SEQUENCE = (ALL_GATHER.name, REDUCE_SCATTER.name)
"""Kinds along tp by which its ranks share the sequence."""

MOST = 0.5
"""A reason that explains this share of what is exposed is given as the reason."""


@dataclass(slots=True)
class _Group:
    """The communication of an axis, or of sequence parallelism."""

    name: str
    axis: str
    exposed: list[Span] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)

    @property
    def exposed_us(self) -> float:
        return sum(span.duration_us for span in self.exposed)


def advice_grid(timeline: Timeline, plan: Plan | None) -> Grid | None:
    """A row for each axis with exposed communication that is worth a reader's time; None where there is none.

    Without a plan only what the timeline tells is judged."""
    rows = []
    for group in _groups(timeline):
        traffic = traffic_among(timeline, group.axis, group.name, [*group.messages, *group.exposed])
        share = traffic.exposed_us / timeline.step_us if timeline.step_us else 0.0
        if share < LEAST_SHARE:
            continue
        reason, words = _why(group, traffic, timeline, plan)
        told = f"{format_us(traffic.exposed_us)} ({format_share(share)})"
        rows.append(
            (group.name, told, words, help_for(reason, group.name, plan, _compute_us(timeline), traffic))
        )
    if not rows:
        return None
    head = ("", "exposed", "why", "what would help")
    caption = f"exposed: mean of the {timeline.counted}"
    return Grid("Why communication is exposed", head, rows, (0, 2, 3), caption)


def _groups(timeline: Timeline) -> list[_Group]:
    """In the order of axes."""
    found: dict[tuple[str, str], _Group] = {}
    for span in timeline.spans:
        if span.kind not in (SpanKind.MESSAGE, SpanKind.EXPOSED):
            continue
        axis, kind = communication_of(span.name)
        name = SEQUENCE if axis == TENSOR and kind in OF_SEQUENCE else axis
        group = found.setdefault((axis, name), _Group(name, axis))
        (group.messages if span.kind is SpanKind.MESSAGE else group.exposed).append(span)
    return sorted(found.values(), key=lambda group: (AXES.index(group.axis), group.name))


def _why(group: _Group, traffic: Traffic, timeline: Timeline, plan: Plan | None) -> tuple[Reason, str]:
    """The reason, and it in words."""
    exposed_us, compute_us = traffic.exposed_us, _compute_us(timeline)
    late_us = _late_us(group, timeline)
    if late_us >= MOST * exposed_us:
        return Reason.LATE, f"{format_us(late_us)} a rank is spent until the last rank has begun its part"
    if plan is not None and plan.overlap == "off":
        return Reason.OFF, "the plan waits for each as soon as it is started (overlap = off)"
    after_us = _after_us(group, timeline) / timeline.ranks
    if after_us >= MOST * exposed_us:
        return (
            Reason.END,
            f"{format_us(after_us)} of it is after a rank's last op, with nothing left to hide it",
        )
    before_us = _before_us(group, timeline) / timeline.ranks
    if before_us >= MOST * exposed_us:
        return Reason.BEGIN, f"{format_us(before_us)} of it is before a rank's first op: the pipeline fills"
    if traffic.total_us > compute_us:
        times = format_us(traffic.total_us), format_us(compute_us)
        return Reason.NETWORK, f"it takes {times[0]}, and all compute that could hide it {times[1]}"
    latency = _latency(group, plan)
    if latency >= MOST:
        count, mean = len(group.messages), sum(s.nbytes for s in group.messages) / len(group.messages)
        words = (
            f"{count:,} of {format_bytes(mean)} on average: {format_share(latency)} of their time is latency"
        )
        return Reason.LATENCY, words
    return Reason.ORDER, "what needs it follows too soon: there are not enough other ops to run meanwhile"


def _compute_us(timeline: Timeline) -> float:
    return sum(timeline.by_rank(SpanKind.COMPUTE)) / timeline.ranks


def _late_us(group: _Group, timeline: Timeline) -> float:
    """How long a rank waits, on average, for other ranks along the axis: measured timelines say. Between
    places such waiting is a bubble."""
    if group.axis == PIPELINE or not timeline.busy_us:
        return 0.0
    return sum(stall.us for stall in timeline.stalls if stall.axis == group.axis) / len(timeline.busy_us)


def _ends(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """Rank -> when its first op begins, and its last ends."""
    found: dict[int, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE and span.kind is SpanKind.COMPUTE:
            first, last = found.get(span.rank, (span.start_us, span.end_us))
            found[span.rank] = min(first, span.start_us), max(last, span.end_us)
    return found


def _after_us(group: _Group, timeline: Timeline) -> float:
    ends = _ends(timeline)
    never = (0.0, timeline.step_us)
    return sum(s.duration_us for s in group.exposed if s.start_us >= ends.get(s.rank, never)[1])


def _before_us(group: _Group, timeline: Timeline) -> float:
    ends = _ends(timeline)
    never = (0.0, timeline.step_us)
    return sum(s.duration_us for s in group.exposed if s.end_us <= ends.get(s.rank, never)[0])


def _latency(group: _Group, plan: Plan | None) -> float:
    """Share of its communications' time that they would take without a byte, by the plan's costs; 0 where
    these do not say."""
    if plan is None:
        return 0.0
    empty_us, whole_us = 0.0, 0.0
    counted: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for span in group.messages:
        kind = communication_of(span.name)[1]
        counted[kind, span.nbytes, -1 if span.sender is None else span.sender, span.rank] += 1
    for (kind, nbytes, sender, receiver), count in counted.items():
        if sender >= 0:
            link = plan.costs.link(sender, receiver)
            empty_us += count * message_us(link, 0)
            whole_us += count * message_us(link, nbytes)
            continue
        cost = plan.costs.collectives.get((group.axis, kind)) or plan.costs.collectives.get((group.axis, SUM))
        if cost is not None:
            empty_us += count * cost.curve.us(0)
            whole_us += count * cost.curve.us(nbytes)
    return empty_us / whole_us if whole_us else 0.0
