"""One line that says how much a proof has covered."""

from __future__ import annotations

from stretto.ir.action import Schedule
from stretto.ir.plan import LOSS, Plan
from stretto.ir.program import STARTS
from stretto.verifying.trace import EventKind, trace_of


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

    Actions, messages, collectives and sums are counted once for all ranks that share a pipeline rank.
    """
    events = [event for rank in range(plan.ranks) for event in trace_of(plan, rank)]
    received = [event.message for event in events if event.kind is EventKind.RECV]
    lanes = {plan.lane_of(edge) for edge, _ in received}
    sums = sum(e.kind is EventKind.REDUCE and e.op is not None and e.op.lane != LOSS for e in events)
    parts = [schedule_summary(plan.schedule)]
    if plan.world != plan.ranks:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes)
        parts = [f"{_count(plan.world, 'rank')} ({mesh})", parts[0].partition(", ")[2]]
    parts.append(f"{_count(len(received), 'message')} on {_count(len(lanes), 'communicator')}")
    for number, one, many in (
        (_collectives(plan), "collective", "collectives"),
        (sums, "sum of gradients", "gradient reductions"),
    ):
        if number:
            parts.append(_count(number, one, many))
    return ", ".join(parts)


def _collectives(plan: Plan) -> int:
    """Collectives of programs in a step, over all pipeline ranks."""
    starts = {
        name: sum(
            op.target in STARTS
            for part in window.actions
            for sub in window.parts[part][1].programs
            for op in plan.job.stages[window.parts[part][0]].ops[sub]
        )
        for name, window in plan.windows.items()
    }
    return sum(starts[window.name] for rank in range(plan.ranks) for _, _, window in plan.runs(rank))


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
