"""One line that says how much a proof has covered."""

from __future__ import annotations

from stretto.ir.action import Schedule
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
    sums = sum(e.kind is EventKind.START and e.op is not None and e.op.lane != LOSS for e in events)
    programs = [
        plan.job.stages[stage].ops[sub]
        for rank in range(plan.ranks)
        for _, _, window in plan.runs(rank)
        for stage, phase in (window.parts[part] for part in window.actions)
        for sub in phase.programs
    ]
    collectives = sum(op.target in STARTS for ops in programs for op in ops)
    more = [(what, n) for what, n in (("collective", collectives), ("gradient reduction", sums)) if n]
    lanes = _counts(("communicator", len(set(received))))
    return ", ".join([head, f"{_counts(('message', len(received)))} on {lanes}", *map(_counts, more)])


def _counts(*counted: tuple[str, int]) -> str:
    plural = {what: "es" if what.endswith("h") else "s" for what, _ in counted}
    return ", ".join(f"{n} {what}{'' if n == 1 else plural[what]}" for what, n in counted)
