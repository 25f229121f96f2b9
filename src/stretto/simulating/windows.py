"""Windows made ready to walk: stretches of ops between communications, each with its summed time.

Knows ops, items and costs; nothing of events. A window of hundreds of ops becomes a few segments, once, so
that the walk's cost is in communications and not in ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.collectives import Collective
from stretto.ir.flow import ops_of_stage
from stretto.ir.plan import ItemKind, Plan, Window
from stretto.ir.program import WAIT, Op
from stretto.ir.transfers import CollectiveTime, collective_time, op_time_us


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
    the timeline; pp_ranks: the pipeline ranks that it joins, () for the ranks of one; op: that starts it;
    sums: whether it sums gradients or the loss, once a step."""

    key: tuple[int, Phase, str]
    axis: str
    name: str
    nbytes: int
    time: CollectiveTime
    pp_ranks: tuple[int, ...]
    op: Op
    sums: bool


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
    ops: tuple[Op | None, ...]
    calls: tuple[Call | None, ...]


def make_ready(plan: Plan, name: str) -> ReadyWindow:
    """Cut the window `name` into segments. Raises PlanError for an unknown window, op, cost or communicator,
    and for a wait for what no op starts."""
    window = plan.windows.get(name)
    if window is None:
        known = ", ".join(plan.windows)
        raise PlanError(
            "cannot simulate the plan", [f"window {name!r} is run but not defined; known: {known}"]
        )
    faults: list[str] = []
    op_us: list[float] = []
    ops: list[Op | None] = []
    calls: list[Call | None] = []
    programs = [ops_of_stage(plan.job.stages[stage], phase) for stage, phase in window.parts]
    for item in window.items:
        op: Op | None = None
        call: Call | None = None
        time_us: float | None = 0.0
        if item.kind is ItemKind.OP:
            stage, phase = window.parts[item.part]
            op, sub = programs[item.part].get(str(item.ref), (None, phase))
            if op is None or sub not in phase.programs:
                faults.append(f"window {name}: op {item.ref} is not in stage {stage}'s programs")
                op = None
            else:
                time_us = op_time_us(plan.costs, stage, op)
                if time_us is None:
                    faults.append(
                        f"window {name}: stage {stage}'s op {op.name} has no time; cost the job again"
                    )
                try:
                    call = _call(plan, stage, programs[item.part], op)
                except ValueError as error:
                    faults.append(f"window {name}: {error}")
                except PlanError as error:
                    faults += [str(fault) for fault in error.faults]
        op_us.append(time_us or 0.0)
        ops.append(op)
        calls.append(call)
    if faults:
        raise PlanError("cannot simulate the plan", list(dict.fromkeys(faults)))
    segments = _segments(plan, window, op_us, ops, calls)
    stretches = tuple(range(segment.first, segment.last) for segment in segments)
    return ReadyWindow(window, segments, stretches, tuple(op_us), tuple(ops), tuple(calls))


def _call(plan: Plan, stage: int, programs: dict[str, tuple[Op, Phase]], op: Op) -> Call | None:
    """The collective that an op starts or waits for. Raises ValueError when it cannot be found."""
    started = op
    if op.target == WAIT:
        result = programs.get(op.uses[0]) if op.uses else None
        if result is None or result[0].collective is None:
            raise ValueError(f"stage {stage}'s op {op.name} waits for what no op of the stage starts")
        started = result[0]
    collective: Collective | None = started.collective
    if collective is None:
        return None
    communicator = next((result for result in plan.communicators if result.name == collective.axis), None)
    if communicator is None:
        raise ValueError(f"stage {stage}'s op {op.name} needs a communicator {collective.axis!r}")
    pp_ranks = communicator.ranks if communicator.joins_pp_ranks else ()
    if pp_ranks and plan.rank_of(stage) not in pp_ranks:
        raise ValueError(f"stage {stage}'s op {op.name} needs a communicator that has its rank")
    time = collective_time(plan.costs, plan.job, communicator, collective)
    key = (stage, programs[started.name][1], started.name)
    return Call(
        *(key, collective.axis, started.label, collective.nbytes, time, pp_ranks, started),
        sums=bool(started.sums),
    )


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
