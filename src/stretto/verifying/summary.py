"""One line that says how much a proof has covered."""

from __future__ import annotations

from stretto.ir.action import ONCE_PHASES, Schedule
from stretto.ir.plan import LOSS, Plan
from stretto.ir.program import STARTS
from stretto.verifying.trace import EventKind, trace_of


def schedule_summary(schedule: Schedule) -> str:
    """`2 ranks, 8 microbatches, 96 actions`."""
    ranks = range(schedule.ranks)
    actions = sum(len(list(schedule.actions(rank))) for rank in ranks)
    return _counts(("rank", len(ranks)), ("microbatch", schedule.microbatches), ("action", actions))


def plan_summary(plan: Plan) -> str:
    """`8 ranks (pp 2 x dp 2 x tp 2), 2 microbatches, 8 actions, 4 messages on 2 communicators, ...`.

    Actions, messages, collectives and sums are counted once for all ranks that share a pipeline rank.
    """
    head = schedule_summary(plan.schedule)
    if plan.world != plan.ranks:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes)
        head = f"{_counts(('rank', plan.world))} ({mesh}), {head.partition(', ')[2]}"
    events = [event for rank in range(plan.ranks) for event in trace_of(plan, rank)]
    received = [plan.lane_of(event.message[0]) for event in events if event.kind is EventKind.RECV]
    gathers, sums = (
        sum(op.target in STARTS and op.lane != LOSS for k in range(plan.ranks) for op in plan.once(k, phase))
        for phase in ONCE_PHASES
    )
    programs = [
        plan.job.stages[stage].ops[sub]
        for rank in range(plan.ranks)
        for _, _, window in plan.runs(rank)
        for stage, phase in (window.parts[part] for part in window.actions)
        for sub in phase.programs
    ]
    collectives = sum(op.target in STARTS for ops in programs for op in ops)
    counted = (("collective", collectives), ("parameter gather", gathers), ("gradient reduction", sums))
    more = [(what, n) for what, n in counted if n]
    lanes = _counts(("communicator", len(set(received))))
    return ", ".join([head, f"{_counts(('message', len(received)))} on {lanes}", *map(_counts, more)])


def _counts(*counted: tuple[str, int]) -> str:
    plural = {what: "es" if what.endswith("h") else "s" for what, _ in counted}
    return ", ".join(f"{n} {what}{'' if n == 1 else plural[what]}" for what, n in counted)
