"""One line that says how much a proof has covered. May touch `stretto.ir`."""

from __future__ import annotations

from stretto.ir.action import Schedule
from stretto.ir.plan import InstructionKind, Plan


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
    """`2 ranks, 8 microbatches, 96 actions, 28 messages on 2 communicators`."""
    messages = [
        plan.lane_of(int(instruction.ref))
        for order in plan.orders
        for instruction in order
        if instruction.kind is InstructionKind.RECV
    ]
    lanes = _count(len(set(messages)), "communicator")
    return f"{schedule_summary(plan.schedule)}, {_count(len(messages), 'message')} on {lanes}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
