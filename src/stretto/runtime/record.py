"""What happened when: cheap marks during the step, and a timeline from all ranks' marks afterwards.

A mark is a tuple with readings of a clock, appended to a list; nothing is computed while the step runs. The
clock is the host's on processors, and the device's own on accelerators: there the host queues work and goes
on, and a mark is an event on the stream that computes. Nothing waits for it; the marks are read when the step
is asked for.

    1. `now` gives a mark, `read` a step's marks in nanoseconds of this process's monotonic clock.
    2. The device's time is tied to the host's by one event that the host waits for. Events differ exactly, so
       that what a rank does is exact, however rough the tie.

The timeline has the same tracks and accounts as the simulated one.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from stretto.backend.device_time import mark
from stretto.ir.action import Action, Phase
from stretto.ir.axes import PIPELINE
from stretto.ir.flow import PHASES
from stretto.ir.plan import Plan
from stretto.ir.timeline import (
    COMPUTE_LANE,
    Span,
    SpanKind,
    Stall,
    Timeline,
    axis_of,
    without_closing_waits,
)
from stretto.ir.transfers import SUM, message_us

LEAST_SPAN_US = 1.0
"""Waits shorter than this are the cost of asking, not of waiting."""

THERE_US = {"cpu": 200.0, "cuda": 5.0}
"""By kind of device: a wait shorter than this found the message there. No one saw it arrive, and it is drawn
as long as the link is known to take. Measured: Gloo answers such a wait in 20 to 100 us, two events with
a view between them are about 2 us apart on an H200."""

Message = tuple[int, int]

Asked = tuple[int, Phase, int]
"""(stage, phase, microbatch) of a collective that an op starts."""


@dataclass
class Marks:
    """One rank's marks of one step, in its own clock: nanoseconds where it has been read."""

    start: int = 0
    end: int = 0
    runs: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)
    """(window, microbatches, start, end)."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """(start, part) of a window that several actions share: whose ops run from then on."""
    waits: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(edge, microbatch, start, end) of waits for received values."""
    sends: list[tuple[int, int, int]] = field(default_factory=list)
    """(edge, microbatch, start)."""
    starts: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, bytes, start) of collectives: the program's, gradient reductions, the loss; names begin with
    the axis."""
    finishes: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(name, communicator, start, end) of waits for them."""
    others: list[tuple[str, int, int]] = field(default_factory=list)
    """(axis and name, start, end) of waits for sends."""
    peak_bytes: int = 0


def build_timeline(plan: Plan, marks: Sequence[Marks], offsets_us: Sequence[float]) -> Timeline:
    """The measured timeline of the plan's pipeline ranks.

    marks[rank], offsets_us[rank] = rank 0's clock minus that rank's, for every rank of the run. Ranks that
    differ in other coordinates than pp do equal work: a pipeline rank shows the first of them; the step
    lasts until the last of all ends, and the peak is the highest of a pipeline rank's ranks.
    """
    begin_us = min(m.start / 1000.0 + offset for m, offset in zip(marks, offsets_us, strict=True))

    def us(rank: int, ns: int) -> float:
        return ns / 1000.0 + offsets_us[rank] - begin_us

    step_us = max(us(rank, m.end) for rank, m in enumerate(marks))
    mesh = plan.mesh
    sent: dict[tuple[int, Message], float] = {
        (rank, (edge, mb)): us(rank, at) for rank, m in enumerate(marks) for edge, mb, at in m.sends
    }
    turns = [Turns(plan, m) for m in marks]
    phases = {
        (stage.index, op.label): phase
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if op.collective is not None
    }

    def asked_by(rank: int, name: str, time_ns: int) -> Asked | None:
        """Whose a collective is that was started, or waited for, then; None for what runs once a step."""
        action = turns[rank].at(time_ns)
        phase = None if action is None else phases.get((action.stage, name))
        return None if action is None or phase is None else (action.stage, phase, action.microbatch)

    started = [
        {(name, asked_by(rank, name, at)): (us(rank, at), nbytes) for name, nbytes, at in m.starts}
        for rank, m in enumerate(marks)
    ]
    stalls: dict[tuple[str, int, int], float] = defaultdict(float)

    def stall(axis: str, rank: int, on: int, begun: float, waited: tuple[float, float]) -> None:
        """Who waits for whom: of each wait, what is before the last of those that take part has begun."""
        stalled_us = min(begun, waited[1]) - waited[0]
        if on != rank and stalled_us > LEAST_SPAN_US:
            stalls[axis, rank, on] += stalled_us

    spans: list[Span] = []
    for rank, m in enumerate(marks):
        here = mesh.coordinates(rank)
        pp_rank = here[PIPELINE]
        lane: list[Span] = []
        idle: list[Span] = []
        for edge_index, mb, start_ns, end_ns in m.waits:
            waited = (us(rank, start_ns), us(rank, end_ns))
            sender = mesh.rank({**here, PIPELINE: plan.rank_of(plan.job.edges[edge_index].source)})
            left = sent.get((sender, (edge_index, mb)), waited[0])
            stall(PIPELINE, rank, sender, left, waited)
            lane.append(_message(plan, pp_rank, edge_index, mb, left, waited))
            # Until the sender had made the value there was nothing to transfer: that is a bubble.
            idle += idle_spans(pp_rank, lane[-1].name, waited[0], left, waited[1])
        for name, communicator, start_ns, end_ns in m.finishes:
            waited = (us(rank, start_ns), us(rank, end_ns))
            members = plan.communicator(communicator)
            key = name, (asked := asked_by(rank, name, start_ns))
            them = mesh.group(rank, members.axes, members.ranks) or ()
            last, on = max(((started[o][key][0], o) for o in them if key in started[o]), default=(0.0, rank))
            stall(axis_of(name), rank, on, last, waited)
            begun, nbytes = started[rank].get(key, (waited[0], 0))
            # Pipeline ranks start when their work is done: until the last has, there is nothing to
            # wait for but work. Ranks that do equal work are late by chance alone, which is a price of
            # communicating.
            begun = max(begun, last) if members.joins_pp_ranks else begun
            lane.append(_collective(plan, pp_rank, communicator, name, begun, waited, nbytes, asked))
            idle += idle_spans(pp_rank, name, waited[0], begun, waited[1])
        for name, start_ns, end_ns in m.others:
            waited = (us(rank, start_ns), us(rank, end_ns))
            idle += idle_spans(pp_rank, name, waited[0], waited[0], waited[1])
        idle.sort(key=lambda span: span.start_us)
        if rank == mesh.rank({PIPELINE: pp_rank}):
            work = [*compute_spans(plan, pp_rank, m, partial(us, rank), idle), *idle]
            spans += [*lane, *work, *gap_spans(pp_rank, work, step_us)]
    peaks = [0] * plan.ranks
    for rank, m in enumerate(marks):
        pp_rank = mesh.pp_rank(rank)
        peaks[pp_rank] = max(peaks[pp_rank], m.peak_bytes)
    return Timeline(
        "measured",
        plan.ranks,
        step_us,
        tuple(without_closing_waits(spans)),
        tuple(peaks),
        members=plan.members,
        busy_us=tuple(busy_us(m) for m in marks),
        stalls=tuple(Stall(*key, stalled_us) for key, stalled_us in sorted(stalls.items())),
    )


def busy_us(marks: Marks) -> float:
    """How long a rank's windows ran, without what they waited for (waits are also between them)."""
    runs = [(start, end) for _, _, start, end in marks.runs]
    total = sum(end - start for start, end in runs)
    for *_, start, end in (*marks.waits, *marks.finishes):
        at = bisect_right(runs, start, key=lambda run: run[0]) - 1
        if at >= 0 and start < runs[at][1]:
            total -= end - start
    return total / 1000.0


class Turns:
    """Whose ops a rank ran when: runs of its windows, and the parts of those that several actions share."""

    def __init__(self, plan: Plan, marks: Marks) -> None:
        self._since: list[int] = []
        self.turns: list[tuple[int, int, Action]] = []
        """(start, end, action), in ns, ascending."""
        for name, microbatches, start, end in marks.runs:
            parts = plan.windows[name].parts
            actions = [Action(*part, mb) for part, mb in zip(parts, microbatches, strict=True)]
            first, last = bisect_left(marks.parts, (start, 0)), bisect_left(marks.parts, (end + 1, 0))
            entered = marks.parts[first:last] or [(start, 0)]
            since = [start, *(at for at, _ in entered[1:])]
            for begin, stop, (_, part) in zip(since, [*since[1:], end], entered, strict=True):
                self.turns.append((begin, stop, actions[part]))
                self._since.append(begin)

    def at(self, time: int) -> Action | None:
        """Whose ops ran at a time; None between runs."""
        result = bisect_right(self._since, time) - 1
        return self.turns[result][2] if result >= 0 and time <= self.turns[result][1] else None


def _message(
    plan: Plan, pp_rank: int, edge_index: int, mb: int, left: float, waited: tuple[float, float]
) -> Span:
    edge = plan.job.edges[edge_index]
    sender = plan.rank_of(edge.source)
    arrived = waited[1]
    if waited[1] - waited[0] < THERE_US[plan.job.device]:
        arrived = min(arrived, left + message_us(plan.costs.link(sender, pp_rank), edge.spec.nbytes))
    return Span(
        pp_rank,
        plan.lane_of(edge_index),
        SpanKind.MESSAGE,
        f"{plan.lane_of(edge_index)} e{edge_index}:{mb}",
        left,
        max(arrived, left),
        stage=edge.source,
        phase=edge.phase,
        microbatch=mb,
        nbytes=edge.spec.nbytes,
        sender=sender,
        sent_us=left,
        edge=edge_index,
    )


def _collective(
    plan: Plan,
    pp_rank: int,
    lane: str,
    name: str,
    begun: float,
    waited: tuple[float, float],
    nbytes: int,
    asked: Asked | None,
) -> Span:
    done = waited[1]
    words = name.split(" ")
    kind = words[1] if (words[0], words[1]) in plan.costs.collectives else SUM
    cost = plan.costs.collectives.get((words[0], kind))
    if waited[1] - waited[0] < THERE_US[plan.job.device] and cost is not None:
        done = min(done, begun + cost.curve.us(nbytes))
    stage, phase, microbatch = asked or (None, None, None)
    end = max(done, begun)
    return Span(pp_rank, lane, SpanKind.MESSAGE, name, begun, end, stage, phase, microbatch, nbytes)


def idle_spans(rank: int, name: str, start: float, begun: float, stop: float) -> list[Span]:
    """The lane stalled from `start` to `stop`; what it waited for was under way from `begun` on."""
    if stop - start < LEAST_SPAN_US:
        return []
    middle = min(max(begun, start), stop)
    result = []
    if middle > start:
        result.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, name, start, middle))
    if stop > middle:
        result.append(Span(rank, COMPUTE_LANE, SpanKind.EXPOSED, name, middle, stop))
    return result


def compute_spans(
    plan: Plan, rank: int, marks: Marks, at: Callable[[int], float], idle: Sequence[Span]
) -> list[Span]:
    """What runs of windows did for each of their actions, without the waits inside (`idle`, ascending)."""
    spans: list[Span] = []
    gap = 0
    for start_ns, stop_ns, action in Turns(plan, marks).turns:
        start, stop = at(start_ns), at(stop_ns)
        while gap < len(idle) and idle[gap].start_us < stop:
            if idle[gap].start_us > start:
                spans.append(_run(rank, action, start, idle[gap].start_us))
            start = max(start, idle[gap].end_us)
            if start > stop:
                break
            gap += 1
        if stop > start:
            spans.append(_run(rank, action, start, stop))
    return spans


def _run(rank: int, action: Action, start: float, stop: float) -> Span:
    where = action.stage, action.phase, action.microbatch
    return Span(rank, COMPUTE_LANE, SpanKind.COMPUTE, str(action), start, stop, *where)


def gap_spans(rank: int, spans: Sequence[Span], end: float) -> list[Span]:
    """Bubbles where the compute lane shows nothing, so that its accounts add up to the step."""
    result: list[Span] = []
    cursor = 0.0
    for span in sorted(spans, key=lambda s: s.start_us):
        if span.start_us - cursor > LEAST_SPAN_US:
            result.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "idle", cursor, span.start_us))
        cursor = max(cursor, span.end_us)
    if end - cursor > LEAST_SPAN_US:
        result.append(Span(rank, COMPUTE_LANE, SpanKind.BUBBLE, "end of the step", cursor, end))
    return result


class HostClock:
    """What `Marks` are made with: nanoseconds at once."""

    def now(self) -> Any:
        """A mark: what `read` will know the time of."""
        return time.perf_counter_ns()

    def read(self, marks: Marks) -> Marks:
        """The same marks, in nanoseconds of `time.perf_counter_ns`; those that are read already stay."""
        return marks


class DeviceClock(HostClock):
    """Marks are events on the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        return mark(torch.cuda.current_stream(self._device))

    def read(self, marks: Marks) -> Marks:
        """Step 2. Waits for the device. The sooner after the step, the better: two clocks drift apart, and a
        long time between events is known to fewer digits."""
        if not isinstance(marks.start, torch.cuda.Event):
            return marks
        tie = self.now()
        tie.synchronize()
        host_ns = time.perf_counter_ns()
        start: Any = marks.start
        start_ns = host_ns - round(1e6 * start.elapsed_time(tie))

        def ns(mark: Any) -> Any:
            if isinstance(mark, torch.cuda.Event):
                return start_ns + round(1e6 * start.elapsed_time(mark))
            return [tuple(map(ns, item)) for item in mark] if isinstance(mark, list) else mark

        return replace(marks, **{field.name: ns(getattr(marks, field.name)) for field in fields(marks)})


def clock_of(device: torch.device) -> HostClock:
    """The clock of a device's work."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
