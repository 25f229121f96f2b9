"""Which slices depend on which, as flows for a trace viewer: messages from sender to receiver, collectives
from their start to what runs after their wait.

A flow is a number that several slices carry; they must begin in the order of the flow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.plan import Plan
from stretto.ir.program import WAIT
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from stretto.report.detail import OpRow, laid_over, runs_of, window_ops


@dataclass(frozen=True, slots=True)
class OpSlice:
    """A stretch of a compute span in which an op runs. at: the op's place in its window."""

    row: OpRow
    at: int
    start_us: float
    end_us: float


Nested = Mapping[int, list[OpSlice]]
"""Identity of a compute span -> the ops within it, in order."""

Flows = Mapping[int, list[int]]
"""Identity of a span or an op's slice -> the flows through it."""


def count_ops(plan: Plan, timelines: Iterable[Timeline]) -> int:
    """How many op slices `nested_ops` would make of the timelines, about."""
    timed = {name: sum(row.us > 0 for row in rows) for name, rows in window_ops(plan).items()}
    return sum(timed[run.window] for t in timelines for runs in runs_of(plan, t) for run in runs)


def nested_ops(plan: Plan, timeline: Timeline) -> dict[int, list[OpSlice]]:
    """The ops of every run, laid over its compute spans."""
    found: dict[int, list[OpSlice]] = {}
    windows = window_ops(plan)
    times_us = {name: [row.us for row in rows] for name, rows in windows.items()}
    for runs in runs_of(plan, timeline):
        for run in runs:
            spans = iter(run.spans)
            span = next(spans)
            inside = found.setdefault(id(span), [])
            for at, start_us, end_us in laid_over(times_us[run.window], run.spans):
                while start_us >= span.end_us:
                    span = next(spans)
                    inside = found.setdefault(id(span), [])
                inside.append(OpSlice(windows[run.window][at], at, start_us, end_us))
    return found


def flows_of(timeline: Timeline, first_flow: int, plan: Plan | None, nested: Nested) -> dict[int, list[int]]:
    """The flows of a timeline, numbered from `first_flow`; with `nested` ops, collectives lead to those."""
    compute: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda s: s.start_us):
        if span.lane == COMPUTE_LANE and span.kind is SpanKind.COMPUTE:
            compute[span.rank].append(span)
    starts = {rank: [s.start_us for s in spans] for rank, spans in compute.items()}
    ops = _Ops(plan, timeline, nested)
    flows: dict[int, list[int]] = defaultdict(list)
    messages = [s for s in timeline.spans if s.kind is SpanKind.MESSAGE]
    for flow, message in enumerate(messages, start=first_flow):
        if message.sender is None:
            ends = ops.ends(message) or _around(message, compute[message.rank], starts.get(message.rank, []))
        else:
            sender = message.sender
            ends = _between(message, compute[sender], starts.get(sender, []), compute[message.rank], starts)
        flows[id(message)].append(flow)
        for end in ends:
            flows[id(end)].append(flow)
    return flows


def _running(spans: Sequence[Span], starts: Sequence[float], at_us: float) -> int:
    """The compute span that runs at a time, or ran last; -1 when none did."""
    at = bisect_right(starts, at_us) - 1
    # What leaves as its op ends may be found in the slice that begins then.
    return at - 1 if at > 0 and spans[at - 1].end_us >= at_us else at


def _between(
    message: Span,
    sends: Sequence[Span],
    send_starts: Sequence[float],
    receives: Sequence[Span],
    starts: Mapping[int, Sequence[float]],
) -> list[Span]:
    """The sender's slice that made a message, and the receiver's that first runs with it."""
    at = _running(sends, send_starts, message.start_us if message.sent_us is None else message.sent_us)
    found = [sends[at]] if at >= 0 else []
    first = bisect_right(starts.get(message.rank, []), message.start_us)
    for span in receives[first:]:
        if span.microbatch == message.microbatch and span.end_us > message.end_us:
            return [*found, span]
    return found


def _around(message: Span, spans: Sequence[Span], starts: Sequence[float]) -> list[Span]:
    """The slice in which a collective starts, and the first one that begins after it has ended."""
    at = _running(spans, starts, message.start_us)
    found = [spans[at]] if at >= 0 else []
    after = bisect_right(starts, message.end_us - 1e-6)
    return [*found, spans[after]] if after < len(spans) and after != at else found


class _Ops:
    """Finds the ops around a collective's start and wait."""

    def __init__(self, plan: Plan | None, timeline: Timeline, nested: Nested) -> None:
        self._runs: dict[tuple[int, int | None, int | None], list[tuple[str, list[OpSlice]]]] = defaultdict(
            list
        )
        self._at: dict[str, dict[tuple[int, str], tuple[int, int]]] = {}
        """By window, (stage, name of a collective) -> the places of its start and its wait."""
        if plan is None or not nested:
            return
        for rank, runs in enumerate(runs_of(plan, timeline)):
            for run in runs:
                slices = [piece for span in run.spans for piece in nested.get(id(span), ())]
                parts = plan.windows[run.window].parts
                for (stage, _), microbatch in zip(parts, run.microbatches, strict=True):
                    self._runs[rank, stage, microbatch].append((run.window, slices))
        for window, ops in window_ops(plan).items():
            starts = {
                (row.stage, row.op.name): (at, row.op.label)
                for at, row in enumerate(ops)
                if row.op.collective is not None
            }
            found = self._at[window] = {}
            for waited, row in enumerate(ops):
                if row.op.target == WAIT and (row.stage, str(row.op.alias)) in starts:
                    at, label = starts[row.stage, str(row.op.alias)]
                    found[row.stage, label] = at, waited

    def ends(self, message: Span) -> list[OpSlice]:
        """The last op before the start and the first after the wait; empty when they are not known."""
        if message.stage is None:
            return []
        for window, slices in self._runs.get((message.rank, message.stage, message.microbatch), ()):
            if (message.stage, message.name) in self._at[window]:
                started, waited = self._at[window][message.stage, message.name]
                # Slices are in the order of their ops.
                before = bisect_right(slices, started, key=lambda s: s.at)
                after = bisect_right(slices, waited, key=lambda s: s.at)
                return [*slices[before - 1 : before], *slices[after : after + 1]]
        return []
