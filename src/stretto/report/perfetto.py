"""Timelines as native Perfetto traces, which ui.perfetto.dev opens: a process a rank, a track a lane.

May touch the `perfetto` package's protobufs. Slices carry a category (F, I, W, B, exposed, bubble, message)
by which the viewer can filter and colour; a flow leads from the slice that sent a message over the message to
the slice that first runs with it; memory is a counter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    CounterDescriptor,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline

NS_PER_US = 1000
SEQUENCE = 1
"""All packets are of one writer; any number but 0 will do."""


def save_perfetto(timeline: Timeline, path: Path) -> None:
    """Write a timeline as a Perfetto trace to `path`."""
    path.write_bytes(to_perfetto(timeline))


def to_perfetto(timeline: Timeline) -> bytes:
    """A timeline as the bytes of a Perfetto trace (protobuf `Trace`); times become nanoseconds."""
    return _Writer(timeline).write()


def category(span: Span) -> str:
    """F, I, W or B for compute; exposed, bubble or message for the rest."""
    if span.kind is SpanKind.COMPUTE and span.phase is not None:
        return span.phase.value
    return span.kind.value


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.builder = TraceProtoBuilder()
        self.next_uuid = 1
        self.lanes: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
        for span in sorted(timeline.spans, key=lambda s: (s.start_us, s.end_us)):
            self.lanes[span.rank][span.lane].append(span)
        self.flows = self._flows()

    def write(self) -> bytes:
        for rank in range(self.timeline.ranks):
            process = self._process(rank)
            lanes = self.lanes[rank]
            for position, lane in enumerate(sorted(lanes, key=lambda name: (name != COMPUTE_LANE, name))):
                # Latency is pipelined, so messages of one lane may overlap; slices of one track may not.
                for row in _rows(lanes[lane]):
                    track = self._track(process, lane, position)
                    for span in row:
                        self._slice(track, span)
            if rank < len(self.timeline.memory) and self.timeline.memory[rank]:
                self._memory(process, self.timeline.memory[rank], len(lanes))
        data: bytes = self.builder.serialize()
        return data

    # --- tracks -------------------------------------------------------------------------------------

    def _uuid(self) -> int:
        self.next_uuid += 1
        return self.next_uuid

    def _process(self, rank: int) -> int:
        uuid = self._uuid()
        packet = self._packet(0)
        descriptor = packet.track_descriptor
        descriptor.uuid = uuid
        descriptor.process.pid = rank + 1  # 0 is the idle process in the viewer
        descriptor.process.process_name = f"rank {rank} ({self.timeline.source})"
        descriptor.child_ordering = TrackDescriptor.ChildTracksOrdering.EXPLICIT
        descriptor.sibling_order_rank = rank
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
        begin = self._packet(span.start_us).track_event
        begin.type = TrackEvent.TYPE_SLICE_BEGIN
        begin.track_uuid = track
        begin.name = span.kind.value if span.kind is SpanKind.BUBBLE else span.name
        begin.categories.append(category(span))
        begin.flow_ids.extend(self.flows.get(id(span), ()))
        for key, value in _details(span):
            annotation = begin.debug_annotations.add()
            annotation.name = key
            if isinstance(value, int):
                annotation.int_value = value
            elif isinstance(value, float):
                annotation.double_value = value
            else:
                annotation.string_value = value
        end = self._packet(span.end_us).track_event
        end.type = TrackEvent.TYPE_SLICE_END
        end.track_uuid = track

    def _flows(self) -> dict[int, list[int]]:
        """Span's identity -> flows through it. A flow's slices must begin in the order of the flow."""
        compute = {
            rank: [s for s in lanes.get(COMPUTE_LANE, ()) if s.kind is SpanKind.COMPUTE]
            for rank, lanes in self.lanes.items()
        }
        starts = {rank: [s.start_us for s in spans] for rank, spans in compute.items()}
        flows: dict[int, list[int]] = defaultdict(list)
        messages = [s for s in self.timeline.spans if s.kind is SpanKind.MESSAGE and s.sender is not None]
        for flow, message in enumerate(messages, start=1):
            sender = message.sender
            assert sender is not None
            sent_us = message.start_us if message.sent_us is None else message.sent_us
            flows[id(message)].append(flow)
            at = bisect_right(starts.get(sender, []), sent_us) - 1
            # A message that leaves as its op ends may be found in the slice that begins then.
            if at > 0 and compute[sender][at - 1].end_us >= sent_us:
                at -= 1
            if at >= 0:
                flows[id(compute[sender][at])].append(flow)
            first = bisect_right(starts.get(message.rank, []), message.start_us)
            for span in compute.get(message.rank, [])[first:]:
                if span.microbatch == message.microbatch and span.end_us > message.end_us:
                    flows[id(span)].append(flow)
                    break
        return flows


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
