"""Timelines as native Perfetto traces, which ui.perfetto.dev opens: a process a rank, a track a lane.

Slices carry a category (F, I, W, B, exposed, bubble, message, op) by which the viewer can filter and colour.
With a plan, the ops of an action are slices inside it, with their shapes. Flows lead from a message's sender
to its receiver, and from a collective's start to what runs after its wait; a flow is a number that several
slices carry, and they must begin in the order of the flow. Memory is a counter. Several timelines are in one
trace rank by rank, the predicted above the measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from stretto.files.whole_file import write_file
from stretto.ir.action import ONCE
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT, TensorSpec
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.report.detail import (
    OpRow,
    laid_over,
    op_category,
    op_data,
    rows_of,
    runs_of,
    span_category,
    specs_of,
    window_ops,
)

START = attrgetter("start_us")
FIELDS = {int: "int_value", float: "double_value", str: "string_value"}
"""Where a trace keeps a value of a type."""

MOST_OPS = 100_000
"""More op slices than this are written only when they are asked for. Measured: 234 bytes each, so 23 MB."""


@dataclass(frozen=True, slots=True)
class OpSlice:
    """A stretch of a compute span in which an op runs. at: the op's position in its window."""

    row: OpRow
    at: int
    start_us: float
    end_us: float


Details = Iterator[tuple[str, int | float | str]]

Called = tuple[int, int | None, int | None, str]
"""A collective: rank, stage and microbatch (None of what runs once a step), label."""


def count_ops(plan: Plan, timelines: Iterable[Timeline]) -> int:
    """How many op slices `laid_ops` would make of the timelines, about."""
    timed = {name: sum(row.us > 0 for row in rows) for name, rows in window_ops(plan).items()}
    return sum(timed[run.window] for t in timelines for runs in runs_of(plan, t) for run in runs)


def laid_ops(plan: Plan, timeline: Timeline) -> tuple[dict[int, list[OpSlice]], dict[Called, list[OpSlice]]]:
    """The ops of every run, laid over its compute spans: identity of a span -> the ops within it, in order;
    and of each collective, the last op before its start and the first after its wait."""
    nested: dict[int, list[OpSlice]] = defaultdict(list)
    around: dict[Called, list[OpSlice]] = {}
    windows = window_ops(plan)
    times_us = {name: [row.us for row in rows] for name, rows in windows.items()}
    for rank, run in ((rank, run) for rank, runs in enumerate(runs_of(plan, timeline)) for run in runs):
        rows, slices = windows[run.window], list[OpSlice]()
        for at, span, start_us, end_us in laid_over(times_us[run.window], run.spans):
            slices.append(OpSlice(rows[at], at, start_us, end_us))
            nested[id(span)].append(slices[-1])
        starts = {(row.part, row.op.name): at for at, row in enumerate(rows) if row.op.collective is not None}
        for waited, row in enumerate(rows):
            started = starts.get((row.part, str(row.op.alias))) if row.op.target == WAIT else None
            if started is not None:
                before = bisect_right(slices, started, key=attrgetter("at"))
                after = bisect_right(slices, waited, key=attrgetter("at"))
                microbatch = run.microbatches[row.part]
                whose = (row.stage, microbatch) if microbatch != ONCE else (None, None)
                called = (rank, *whose, rows[started].op.label)
                around.setdefault(called, [*slices[before - 1 : before], *slices[after : after + 1]])
    return nested, around


def flows_of(
    timeline: Timeline, first_flow: int, ops: Mapping[Called, list[OpSlice]]
) -> dict[int, list[int]]:
    """The flows of a timeline, numbered from `first_flow`. ops: around collectives, to which these lead."""
    compute = [
        [span for span in rows[COMPUTE_LANE] if span.kind is SpanKind.COMPUTE] for rows in rows_of(timeline)
    ]
    flows: dict[int, list[int]] = defaultdict(list)
    messages = [span for span in timeline.spans if span.kind is SpanKind.MESSAGE]
    for flow, message in enumerate(messages, start=first_flow):
        own = compute[message.rank]
        ends: Sequence[Span | OpSlice]
        if message.sender is None:
            called = (message.rank, message.stage, message.microbatch, message.name)
            ends = ops.get(called) or _around(message, own)
        else:
            ends = _between(message, compute[message.sender], own)
        flows[id(message)].append(flow)
        for end in ends:
            flows[id(end)].append(flow)
    return flows


def _running(spans: Sequence[Span], at_us: float) -> int:
    """The compute span that runs at a time, or ran last; -1 when none did."""
    at = bisect_right(spans, at_us, key=START) - 1
    # What leaves as its op ends may be found in the slice that begins then.
    return at - 1 if at > 0 and spans[at - 1].end_us >= at_us else at


def _between(message: Span, sends: Sequence[Span], receives: Sequence[Span]) -> list[Span]:
    """The sender's slice that made a message, and the receiver's that first runs with it."""
    at = _running(sends, message.start_us if message.sent_us is None else message.sent_us)
    ends = [sends[at]] if at >= 0 else []
    for span in receives[bisect_right(receives, message.start_us, key=START) :]:
        if span.microbatch == message.microbatch and span.end_us > message.end_us:
            return [*ends, span]
    return ends


def _around(message: Span, spans: Sequence[Span]) -> list[Span]:
    """The slice in which a collective starts, and the first one that begins after it has ended."""
    at = _running(spans, message.start_us)
    ends = [spans[at]] if at >= 0 else []
    after = bisect_right(spans, message.end_us - 1e-6, key=START)
    return [*ends, spans[after]] if after < len(spans) and after != at else ends


def save_perfetto(timeline: Timeline | Sequence[Timeline], path: Path, plan: Plan | None = None) -> None:
    """Write a timeline, or several, as a Perfetto trace to `path`; ops are inside when there is a plan, and
    when they are not too many (`ops_left_out`)."""
    write_file(path, to_perfetto(timeline, plan))


def ops_left_out(timeline: Timeline | Sequence[Timeline], plan: Plan | None) -> str:
    """In words, that `save_perfetto` leaves ops out because they are more than `MOST_OPS`; else empty."""
    if plan is None:
        return ""
    count = count_ops(plan, [timeline] if isinstance(timeline, Timeline) else timeline)
    if count <= MOST_OPS:
        return ""
    return f" (without its {count:,} ops: more than {MOST_OPS:,} make a file that viewers open slowly)"


def to_perfetto(timeline: Timeline | Sequence[Timeline], plan: Plan | None = None) -> bytes:
    """Timelines as the bytes of a Perfetto trace (protobuf `Trace`); times become nanoseconds.

    plan: what the timelines are of. Without it, and where they are more than `MOST_OPS`, there are no ops.
    """
    timelines = [timeline] if isinstance(timeline, Timeline) else list(timeline)
    return _Writer(timelines, None if ops_left_out(timelines, plan) else plan).write()


class _Writer:
    def __init__(self, timelines: Sequence[Timeline], plan: Plan | None) -> None:
        """plan: what the ops are of that are written."""
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self.timelines = timelines
        self.plan = plan
        self.builder = TraceProtoBuilder()
        self.next_uuid = 1
        self.next_flow = 1
        self.specs: Mapping[str, TensorSpec] = specs_of(plan.job) if plan is not None else {}

    def write(self) -> bytes:
        for at, timeline in enumerate(self.timelines):
            self._timeline(timeline, at)
        data: bytes = self.builder.serialize()
        return data

    def _timeline(self, timeline: Timeline, at: int) -> None:
        self.nested, around = laid_ops(self.plan, timeline) if self.plan is not None else ({}, {})
        self.flows = flows_of(timeline, self.next_flow, around)
        self.next_flow += len(timeline.spans)
        for rank, lanes in enumerate(rows_of(timeline)):
            position = rank * len(self.timelines) + at
            process = self._track(position)
            process.process.pid = position + 1  # 0 is the idle process in the viewer
            process.process.process_name = f"{timeline.who(rank)} ({timeline.source})"
            process.child_ordering = process.EXPLICIT
            for number, (lane, spans) in enumerate(lanes.items()):
                # Latency is pipelined, so messages of one lane may overlap; slices of one track may not.
                for row in _rows(spans):
                    track = self._track(number, lane, process.uuid)
                    for span in row:
                        self._slice(track.uuid, span)
            if rank < len(timeline.memory) and timeline.memory[rank]:
                memory = self._track(len(lanes), "memory", process.uuid)
                memory.counter.unit = memory.counter.UNIT_SIZE_BYTES
                for at_us, nbytes in timeline.memory[rank]:
                    event = self._event(memory.uuid, at_us, "TYPE_COUNTER")
                    event.counter_value = nbytes

    def _track(self, position: int, name: str = "", parent: int = 0) -> Any:
        """The descriptor of a new track; of a process without a parent."""
        descriptor = self._packet(0).track_descriptor
        self.next_uuid += 1
        descriptor.uuid = self.next_uuid
        descriptor.sibling_order_rank = position
        if parent:
            descriptor.parent_uuid = parent
            descriptor.name = name
        return descriptor

    def _packet(self, time_us: float) -> Any:
        packet = self.builder.add_packet()
        packet.timestamp = round(time_us * 1000)  # in ns
        packet.trusted_packet_sequence_id = 1  # all are of one writer; any number but 0 will do
        return packet

    def _event(self, track: int, time_us: float, kind: str) -> Any:
        """A new event. kind: the name of one of `TrackEvent`'s types."""
        event = self._packet(time_us).track_event
        event.type = getattr(event, kind)
        event.track_uuid = track
        return event

    def _slice(self, track: int, span: Span) -> None:
        name = span.kind.value if span.kind is SpanKind.BUBBLE else span.name
        self._begin(track, span.start_us, name, span_category(span), id(span), _details(span))
        for op in self.nested.get(id(span), ()):
            self._begin(track, op.start_us, op.row.op.name, "op", id(op), self._op_details(op.row))
            self._event(track, op.end_us, "TYPE_SLICE_END")
        self._event(track, span.end_us, "TYPE_SLICE_END")

    def _begin(
        self, track: int, time_us: float, name: str, category: str, identity: int, details: Details
    ) -> None:
        begin = self._event(track, time_us, "TYPE_SLICE_BEGIN")
        begin.name = name
        begin.categories.append(category)
        begin.flow_ids.extend(self.flows.get(identity, ()))
        for key, value in details:
            annotation = begin.debug_annotations.add()
            annotation.name = key
            setattr(annotation, FIELDS[type(value)], value)

    def _op_details(self, row: OpRow) -> Details:
        yield from (
            (key, value) for key, value in op_data(row.op, self.specs).items() if value and key != "name"
        )
        yield "category", op_category(row.op, row.phase)
        yield "predicted_us", row.us


def _details(span: Span) -> Details:
    for key in ("stage", "microbatch", "sender", "sent_us"):
        value: int | float | None = getattr(span, key)
        if value is not None:
            yield key, value
    if span.phase is not None:
        yield "phase", span.phase.value
    if span.nbytes:
        yield "bytes", span.nbytes
    if span.kind is SpanKind.BUBBLE:
        yield "waits for", span.name


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans, ascending in start, on as few rows as have no overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        for row in rows:
            if row[-1].end_us <= span.start_us:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
