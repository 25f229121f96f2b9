"""Windows made ready to walk: stretches of ops between messages, each with its summed time.

Knows ops, items and costs; nothing of events. A window of hundreds of ops becomes a few segments, once, so
that the walk's cost is in messages and not in ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import ItemKind, Plan, Window
from stretto.ir.program import Op
from stretto.schedule.transfers import op_time_us


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops of one part that run one after another, and then perhaps a wait or a send.

    first, last: the range of the window's items whose ops these are (`last` is one past the end).
    edge: of the `control` that follows the ops; -1 when none does. local: the edge stays on the rank.
    """

    part: int
    first: int
    last: int
    work_us: float
    control: ItemKind | None = None
    edge: int = -1
    control_part: int = 0
    local: bool = False


@dataclass(frozen=True, slots=True)
class ReadyWindow:
    """A window cut into segments. op_us[item]: the item's time, 0 for waits and sends."""

    window: Window
    segments: tuple[Segment, ...]
    op_us: tuple[float, ...]
    ops: tuple[Op | None, ...]
    phases: tuple[Phase | None, ...]


def make_ready(plan: Plan, name: str) -> ReadyWindow:
    """Cut the window `name` into segments. Raises PlanError for an unknown window, op or cost."""
    window = plan.windows.get(name)
    if window is None:
        known = ", ".join(plan.windows)
        raise PlanError(
            "cannot simulate the plan", [f"window {name!r} is run but not defined; known: {known}"]
        )
    faults: list[str] = []
    op_us: list[float] = []
    ops: list[Op | None] = []
    phases: list[Phase | None] = []
    programs = {
        (stage, op.name): (op, sub)
        for stage, phase in window.parts
        for sub in phase.parts
        for op in plan.job.stages[stage].ops[sub]
    }
    for item in window.items:
        found: tuple[Op | None, Phase | None] = (None, None)
        time_us: float | None = 0.0
        if item.kind is ItemKind.OP:
            stage = window.parts[item.part][0]
            found = programs.get((stage, str(item.ref)), found)
            op = found[0]
            if op is None:
                faults.append(f"window {name}: op {item.ref} is not in stage {stage}'s programs")
            else:
                free = op.alias is not None or op.target == "getitem"
                time_us = op_time_us(plan.costs, stage, op.name, free)
                if time_us is None:
                    faults.append(
                        f"window {name}: stage {stage}'s op {op.name} has no time; cost the job again"
                    )
        op_us.append(time_us or 0.0)
        ops.append(found[0])
        phases.append(found[1])
    if faults:
        raise PlanError("cannot simulate the plan", faults)
    return ReadyWindow(window, _segments(plan, window, op_us), tuple(op_us), tuple(ops), tuple(phases))


def _segments(plan: Plan, window: Window, op_us: list[float]) -> tuple[Segment, ...]:
    """Cut after every wait and send, and where the ops of another part begin."""
    items = window.items
    cuts = {0, len(items)}
    for at, item in enumerate(items):
        if item.kind is not ItemKind.OP:
            cuts.add(at + 1)
        elif at and items[at - 1].part != item.part:
            cuts.add(at)
    segments: list[Segment] = []
    for first, end in pairwise(sorted(cuts)):
        last_item = items[end - 1]
        part = items[first].part
        control: ItemKind | None = None
        edge, last, local = -1, end, False
        if last_item.kind is not ItemKind.OP:
            control, edge, last = last_item.kind, int(last_item.ref), end - 1
            of = plan.job.edges[edge]
            local = plan.rank_of(of.source) == plan.rank_of(of.target)
        work_us = sum(op_us[first:last])
        segments.append(Segment(part, first, last, work_us, control, edge, last_item.part, local))
    return tuple(segments)
