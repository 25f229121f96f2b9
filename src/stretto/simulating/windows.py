"""Windows made ready to walk: stretches of ops between communications, each with its summed time.

Knows ops, items and costs; nothing of events. A window of hundreds of ops becomes a few segments, once, so
that the walk's cost is in communications and not in ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stretto.errors import PlanError
from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.flow import ops_of_stage
from stretto.ir.plan import ItemKind, Plan, Window
from stretto.ir.program import WAIT, Op
from stretto.ir.transfers import CollectiveTime, collective_time, missing_times, time_of


class Control(IntEnum):
    """What follows a segment's ops: a message or a collective is waited for, or started."""

    NONE = 0
    RECEIVE = 1
    SEND = 2
    FINISH = 3
    START = 4


@dataclass(frozen=True, slots=True)
class Call:
    """An op that starts a collective. key: its stage, phase and name, by which its wait finds it; name: as in
    the timeline; pp_ranks: the pipeline ranks that it joins, () for the ranks of one."""

    key: tuple[int, Phase, str]
    axis: str
    name: str
    nbytes: int
    time: CollectiveTime
    pp_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of one part that run one after another, and then perhaps a control. first, last: the range of the
    window's items (`last` is one past the end). edge: of the message that the control is about, else -1;
    local: it stays on the rank. call: of the collective that the control is about; the op that starts it, or
    waits for it, is the next segment's first."""

    part: int
    first: int
    last: int
    work_us: float
    control: Control = Control.NONE
    edge: int = -1
    control_part: int = 0
    local: bool = False
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class ReadyWindow:
    """A window cut into segments. stretches: their items. By item: op_us, the time on the compute lane, 0
    for what is no op; calls, the collective that it starts or waits for."""

    window: Window
    segments: tuple[Segment, ...]
    stretches: tuple[range, ...]
    op_us: tuple[float, ...]
    calls: tuple[Call | None, ...]


def make_ready(plan: Plan, name: str) -> ReadyWindow:
    """Cut the window `name` into segments. References must be sound. Raises PlanError for an op or a
    collective without a cost."""
    window = plan.windows[name]
    op_us: list[float] = []
    ops: list[Op | None] = []
    calls: list[Call | None] = []
    programs = [ops_of_stage(plan.job.stages[stage], phase) for stage, phase in window.parts]
    for item in window.items:
        op: Op | None = None
        call: Call | None = None
        time_us = 0.0
        if item.kind is ItemKind.OP:
            stage, _ = window.parts[item.part]
            op, phase = programs[item.part][str(item.ref)]
            # Costs may be those of the job alone, without what a plan does once a step.
            if phase not in ONCE_PHASES and (faults := missing_times(plan.costs, stage, [op])):
                raise PlanError("cannot simulate the plan", faults)
            time_us = time_of(plan.costs, stage, op)
            call = _call(plan, stage, programs[item.part], op)
        op_us.append(time_us)
        ops.append(op)
        calls.append(call)
    segments = _segments(plan, window, op_us, ops, calls)
    stretches = tuple(range(segment.first, segment.last) for segment in segments)
    return ReadyWindow(window, segments, stretches, tuple(op_us), tuple(calls))


def _call(plan: Plan, stage: int, programs: dict[str, tuple[Op, Phase]], op: Op) -> Call | None:
    """The collective that an op starts or waits for."""
    started, phase = programs[op.uses[0] if op.target == WAIT else op.name]
    collective = started.collective
    if collective is None:
        return None
    communicator = plan.communicator(collective.axis)
    pp_ranks = communicator.ranks if communicator.joins_pp_ranks else ()
    time = collective_time(plan.costs, plan.job, communicator, collective)
    key = (stage, phase, started.name)
    return Call(key, collective.axis, started.label, collective.nbytes, time, pp_ranks)


def _segments(
    plan: Plan, window: Window, op_us: list[float], ops: list[Op | None], calls: list[Call | None]
) -> tuple[Segment, ...]:
    """Cut after every message's wait and send, before the start and the wait of every collective, and where
    the ops of another part begin."""
    items = window.items
    segments: list[Segment] = []
    first = 0

    def close(last: int, *control: Any, **more: Any) -> None:
        segments.append(Segment(items[first].part, first, last, sum(op_us[first:last]), *control, **more))

    for at, item in enumerate(items):
        op = ops[at]
        if op is None:
            edge = plan.job.edges[int(item.ref)]
            local = plan.rank_of(edge.source) == plan.rank_of(edge.target)
            control = Control.SEND if item.kind is ItemKind.SEND else Control.RECEIVE
            close(at, control, edge.index, item.part, local)
            first = at + 1
        elif calls[at] is not None:
            control = Control.FINISH if op.target == WAIT else Control.START
            close(at, control, control_part=item.part, call=calls[at])
            first = at
        elif at > first and items[at - 1].part != item.part:
            close(at)
            first = at
    if first < len(items):
        close(len(items))
    return tuple(segments)
