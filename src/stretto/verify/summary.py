"""One line that says how much a proof has covered. May touch `stretto.ir`."""

from __future__ import annotations

from stretto.ir.action import Schedule
from stretto.ir.plan import LOSS, InstructionKind, ItemKind, Plan
from stretto.ir.program import STARTS
from stretto.verify.trace import trace_of


def schedule_summary(schedule: Schedule) -> str:
    """`2 ranks, 8 microbatches, 96 actions`."""
    actions = sum(len(list(schedule.actions(rank))) for rank in range(schedule.ranks))
    return ", ".join(
        (
            _count(schedule.ranks, "rank"),
            _count(schedule.microbatches, "microbatch", "microbatches"),
            _count(actions, "action"),
        )
    )


def plan_summary(plan: Plan) -> str:
    """`8 ranks (pp 2 x dp 2 x tp 2), 2 microbatches, 8 actions, 4 messages on 2 communicators, ...`.

    Actions, messages, collectives and sums are counted once for all ranks that share a place.
    """
    kinds = [instruction.kind for order in plan.orders for instruction in order]
    lanes = {
        plan.lane_of(int(instruction.ref))
        for order in plan.orders
        for instruction in order
        if instruction.kind is InstructionKind.RECV
    }
    parts = [schedule_summary(plan.schedule)]
    if plan.world != plan.ranks:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes)
        parts = [f"{_count(plan.world, 'rank')} ({mesh})", parts[0].partition(", ")[2]]
    messages = _count(kinds.count(InstructionKind.RECV), "message")
    parts.append(f"{messages} on {_count(len(lanes), 'communicator')}")
    for number, one, many in (
        (_collectives(plan), "collective", "collectives"),
        (_sums(plan), "sum of gradients", "sums of gradients"),
    ):
        if number:
            parts.append(_count(number, one, many))
    return ", ".join(parts)


def _collectives(plan: Plan) -> int:
    """Collectives of programs in a step, over all places."""
    in_window: dict[str, int] = {}
    for name, window in plan.windows.items():
        starts = {
            (part, op.name)
            for part, (stage, phase) in enumerate(window.parts)
            if part in window.actions
            for sub in phase.parts
            for op in plan.job.stages[stage].ops[sub]
            if op.target in STARTS
        }
        in_window[name] = sum(i.kind is ItemKind.OP and (i.part, i.ref) in starts for i in window.items)
    runs = (i for order in plan.orders for i in order if i.kind is InstructionKind.RUN)
    return sum(in_window[str(run.ref)] for run in runs)


def _sums(plan: Plan) -> int:
    """Sums of gradients in a step, over all places."""
    events = (event for rank in range(plan.ranks) for event in trace_of(plan, rank))
    return sum(event.op is not None and event.op.lane != LOSS for event in events) // 2


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
