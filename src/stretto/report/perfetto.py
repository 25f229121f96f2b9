"""Timelines as native Perfetto traces, which ui.perfetto.dev opens: a process a rank, a track a lane.

Slices carry a category (F, I, W, B, exposed, bubble, message,
op) by which the viewer can filter and colour; with a plan, the ops of an action are slices inside it, with
their shapes; flows follow messages and collectives (`stretto.report.flows`); memory is a counter. Several
timelines are in one trace rank by rank, the predicted above the measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    CounterDescriptor,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from stretto.files.whole_file import write_file
from stretto.ir.plan import Plan
from stretto.ir.program import TensorSpec
from stretto.ir.timeline import Span, SpanKind, Timeline
from stretto.report.detail import shapes_in, shapes_out, span_category, specs_of
from stretto.report.flows import OpSlice, count_ops, flows_of, nested_ops
from stretto.report.lanes import rows_of

NS_PER_US = 1000
SEQUENCE = 1
"""All packets are of one writer; any number but 0 will do."""

MOST_OPS = 100_000
"""More op slices than this are written only when they are asked for. Measured: 234 bytes each, so 23 MB."""


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
        self.nested = nested_ops(self.plan, timeline) if self.plan is not None else {}
        self.flows = flows_of(timeline, self.next_flow, self.plan, self.nested)
        self.next_flow += len(timeline.spans)
        for rank, lanes in enumerate(rows_of(timeline)):
            process = self._process(timeline, rank, at)
            for position, (lane, spans) in enumerate(lanes.items()):
                # Latency is pipelined, so messages of one lane may overlap; slices of one track may not.
                for row in _rows(spans):
                    track = self._track(process, lane, position)
                    for span in row:
                        self._slice(track, span)
            if rank < len(timeline.memory) and timeline.memory[rank]:
                self._memory(process, timeline.memory[rank], len(lanes))

    # --- tracks -------------------------------------------------------------------------------------

    def _uuid(self) -> int:
        self.next_uuid += 1
        return self.next_uuid

    def _process(self, timeline: Timeline, rank: int, at: int) -> int:
        uuid = self._uuid()
        packet = self._packet(0)
        descriptor = packet.track_descriptor
        descriptor.uuid = uuid
        number = rank * len(self.timelines) + at
        descriptor.process.pid = number + 1  # 0 is the idle process in the viewer
        descriptor.process.process_name = f"{timeline.who(rank)} ({timeline.source})"
        descriptor.child_ordering = TrackDescriptor.ChildTracksOrdering.EXPLICIT
        descriptor.sibling_order_rank = number
        return uuid

    def _track(self, parent: int, name: str, position: int) -> int:
        uuid = self._uuid()
        descriptor = self._packet(0).track_descriptor
        descriptor.uuid = uuid
        descriptor.parent_uuid = parent
        descriptor.name = name
        descriptor.sibling_order_rank = position
        return uuid

    def _memory(self, parent: int, steps: Sequence[tuple[float, int]], position: int) -> None:
        uuid = self._uuid()
        descriptor = self._packet(0).track_descriptor
        descriptor.uuid = uuid
        descriptor.parent_uuid = parent
        descriptor.name = "memory"
        descriptor.sibling_order_rank = position
        descriptor.counter.unit = CounterDescriptor.Unit.UNIT_SIZE_BYTES
        for at_us, held in steps:
            event = self._packet(at_us).track_event
            event.type = TrackEvent.TYPE_COUNTER
            event.track_uuid = uuid
            event.counter_value = held

    # --- events -------------------------------------------------------------------------------------

    def _packet(self, time_us: float) -> TracePacket:
        packet = self.builder.add_packet()
        packet.timestamp = round(time_us * NS_PER_US)
        packet.trusted_packet_sequence_id = SEQUENCE
        return packet

    def _slice(self, track: int, span: Span) -> None:
        name = span.kind.value if span.kind is SpanKind.BUBBLE else span.name
        self._begin(track, span.start_us, name, span_category(span), id(span), _details(span))
        for op in self.nested.get(id(span), ()):
            row = op.row
            self._begin(track, op.start_us, row.op.name, "op", id(op), self._op_details(op))
            self._end(track, op.end_us)
        self._end(track, span.end_us)

    def _begin(
        self,
        track: int,
        time_us: float,
        name: str,
        category: str,
        identity: int,
        details: Iterator[tuple[str, int | float | str]],
    ) -> None:
        begin = self._packet(time_us).track_event
        begin.type = TrackEvent.TYPE_SLICE_BEGIN
        begin.track_uuid = track
        begin.name = name
        begin.categories.append(category)
        begin.flow_ids.extend(self.flows.get(identity, ()))
        for key, value in details:
            annotation = begin.debug_annotations.add()
            annotation.name = key
            if isinstance(value, int):
                annotation.int_value = value
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.string_value = value

    def _end(self, track: int, time_us: float) -> None:
        end = self._packet(time_us).track_event
        end.type = TrackEvent.TYPE_SLICE_END
        end.track_uuid = track

    def _op_details(self, slice_: OpSlice) -> Iterator[tuple[str, int | float | str]]:
        row, op = slice_.row, slice_.row.op
        yield "op", op.target
        yield "category", row.category
        if op.module:
            yield "module", op.module
        yield "reads", shapes_in(op, self.specs)
        yield "makes", shapes_out(op)
        yield "bytes", op.nbytes
        if op.flops:
            yield "flops", op.flops
        yield "predicted_us", row.us


def _details(span: Span) -> Iterator[tuple[str, int | float | str]]:
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
    """Spans, ascending in start, on as few rows as hold them without overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        for row in rows:
            if row[-1].end_us <= span.start_us:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows
