"""What happened when: cheap marks during the step, and a timeline from all ranks' marks afterwards.

A mark is a tuple with clock readings in nanoseconds, appended to a list; nothing is computed while the
step runs. The timeline has the same tracks and accounts as the simulated one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.schedule.transfers import message_us

now = time.perf_counter_ns

LEAST_SPAN_US = 1.0
"""Waits shorter than this are the cost of asking, not of waiting."""

THERE_US = 200.0
"""A wait shorter than this found the message there: nobody saw it arrive, and it is drawn as long as the link
is known to take. Measured: Gloo answers such a wait in 20 to 100 us."""

Message = tuple[int, int]


@dataclass
class Marks:
    """One rank's marks of one step, in its own clock (ns)."""

    start: int = 0
    end: int = 0
    runs: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)
    """(window, microbatches, start, end)."""
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(edge, microbatch, start, end) of waits for received values."""
    sends: list[tuple[int, int, int]] = field(default_factory=list)
    """(edge, microbatch, start)."""
    starts: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, bytes, start) of the program's communications; names begin with the lane."""
    finishes: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, start, end) of waits for them."""
    others: list[tuple[str, int, int]] = field(default_factory=list)
    """(axis and name, start, end) of waits for sends, the loss and sums of gradients."""
    peak_bytes: int = 0


def build_timeline(plan: Plan, marks: Sequence[Marks], offsets_us: Sequence[float]) -> Timeline:
    """The measured timeline. marks[rank], offsets_us[rank] = rank 0's clock minus that rank's."""

    def time_us(rank: int, ns: int) -> float:
        return ns / 1000.0 + offsets_us[rank]

    begin = min(time_us(rank, m.start) for rank, m in enumerate(marks))
    end = max(time_us(rank, m.end) for rank, m in enumerate(marks))

    def from_begin(rank: int, ns: int) -> float:
        return time_us(rank, ns) - begin

    sent: dict[Message, float] = {
        (edge, mb): time_us(rank, at) - begin for rank, m in enumerate(marks) for edge, mb, at in m.sends
    }
    spans: list[Span] = []
    for rank, m in enumerate(marks):
        idle: list[Span] = []
        for edge_index, mb, start_ns, end_ns in m.waits:
            start, stop = from_begin(rank, start_ns), from_begin(rank, end_ns)
            edge = plan.job.edges[edge_index]
            lane = plan.lane_of(edge_index)
            left = sent.get((edge_index, mb), start)
            # Until the sender had made the value there was nothing to transfer: that is a bubble.
            middle = min(max(left, start), stop)
            name = f"{lane} e{edge_index}:{mb}"
            if stop - start >= LEAST_SPAN_US:
                idle += _idle(rank, name, start, middle, stop)
            sender = plan.rank_of(edge.source)
            arrived = stop
            if stop - start < THERE_US:
                arrived = min(stop, left + message_us(plan.costs.link(sender, rank), edge.spec.nbytes))
            spans.append(
                Span(
                    rank,
                    lane,
                    SpanKind.MESSAGE,
                    name,
                    left,
                    max(arrived, left),
                    stage=edge.source,
                    phase=edge.phase,
                    microbatch=mb,
                    nbytes=edge.spec.nbytes,
                    sender=sender,
                    sent_us=left,
                )
            )
        for name, start_ns, end_ns in m.others:
            start, stop = from_begin(rank, start_ns), from_begin(rank, end_ns)
            if stop - start >= LEAST_SPAN_US:
                idle += _idle(rank, name, start, start, stop)
        idle.sort(key=lambda span: span.start_us)
        spans += _compute(plan, rank, m, partial(from_begin, rank), idle)
        spans += idle
        spans += _gaps(rank, [s for s in spans if s.rank == rank and s.lane == COMPUTE_LANE], end - begin)
    return Timeline("measured", len(marks), end - begin, tuple(spans), tuple(m.peak_bytes for m in marks))


def _idle(rank: int, name: str, start: float, middle: float, stop: float) -> list[Span]:
    found = []
    if middle > start:
        found.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, name, start, middle))
    if stop > middle:
        found.append(Span(rank, COMPUTE_LANE, SpanKind.EXPOSED, name, middle, stop))
    return found


def _compute(
    plan: Plan, rank: int, marks: Marks, at: Callable[[int], float], idle: Sequence[Span]
) -> list[Span]:
    """Runs of windows, with the waits inside them cut out."""
    spans: list[Span] = []
    for window_name, microbatches, start_ns, end_ns in marks.runs:
        start, stop = at(start_ns), at(end_ns)
        window = plan.windows[window_name]
        stage, phase = window.parts[0]
        name = "+".join(f"{s}{p}{m}" for (s, p), m in zip(window.parts, microbatches, strict=True))
        cursor = start
        for gap in idle:
            if gap.start_us < start or gap.end_us > stop:
                continue
            if gap.start_us > cursor:
                spans.append(_run(rank, name, cursor, gap.start_us, stage, phase, microbatches[0]))
            cursor = max(cursor, gap.end_us)
        if stop > cursor:
            spans.append(_run(rank, name, cursor, stop, stage, phase, microbatches[0]))
    return spans


def _run(rank: int, name: str, start: float, stop: float, stage: int, phase: Phase, mb: int) -> Span:
    return Span(rank, COMPUTE_LANE, SpanKind.COMPUTE, name, start, stop, stage, phase, mb)


def _gaps(rank: int, spans: Sequence[Span], end: float) -> list[Span]:
    """Bubbles where the compute lane shows nothing, so that its accounts add up to the step."""
    found: list[Span] = []
    cursor = 0.0
    for span in sorted(spans, key=lambda s: s.start_us):
        if span.start_us - cursor > LEAST_SPAN_US:
            found.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "idle", cursor, span.start_us))
        cursor = max(cursor, span.end_us)
    if end - cursor > LEAST_SPAN_US:
        found.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "end of the step", cursor, end))
    return found
