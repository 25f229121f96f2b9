"""Proves a lowered plan: one list of proofs, each in its own file, in the order in which they rely on each
other. A proof that looks things up by name runs only if all names are sound; what differs between ranks, and
the walk for deadlock, only if nothing else is wrong, because on other plans they would repeat what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from stretto.ir.action import Action, Overlap, Slot
from stretto.ir.plan import Plan
from stretto.ir.references import broken_references
from stretto.verifying.axis_order import axis_order_faults
from stretto.verifying.calls import repeat_faults, saved_faults
from stretto.verifying.communication import communication_faults
from stretto.verifying.communicators import communicator_faults
from stretto.verifying.fault import Fault
from stretto.verifying.messages import deadlock_faults, message_faults
from stretto.verifying.ops import op_faults
from stretto.verifying.over_step import over_step_faults
from stretto.verifying.placements import placement_faults, sharding_faults
from stretto.verifying.reduced import reduction_faults
from stretto.verifying.schedule import action_faults
from stretto.verifying.shapes import shape_faults
from stretto.verifying.windows import lifetime_faults, window_faults

PROOFS: tuple[Callable[[Plan], Iterable[Fault]], ...] = (
    op_faults,
    shape_faults,
    sharding_faults,
    window_faults,
    communication_faults,
    repeat_faults,
    saved_faults,
    lifetime_faults,
    message_faults,
    communicator_faults,
    over_step_faults,
)
"""What is proved of a plan whose references and actions are sound; all of them always run."""


def plan_faults(plan: Plan) -> list[Fault]:
    """Every fault of the plan; an empty list proves that it runs to its end and reads only what is there."""
    broken = [Fault(b.rank, b.path, b.what, "Name something that exists") for b in broken_references(plan)]
    if broken:
        return broken
    result = list(_agreement(plan))
    walked = replace(plan.schedule, orders=tuple(_slots(plan, rank) for rank in range(plan.ranks)))
    result += action_faults(walked, trains=plan.job.trains)
    for proof in PROOFS:
        result += proof(plan)
    return result or [
        *placement_faults(plan),
        *reduction_faults(plan),
        *axis_order_faults(plan),
        *deadlock_faults(plan),
    ]


def _slots(plan: Plan, rank: int) -> tuple[Slot, ...]:
    """The runs of a rank's order as the slots of a schedule."""
    result: list[Slot] = []
    for _, run, window in plan.runs(rank):
        actions = tuple(Action(*window.parts[part], run.microbatches[part]) for part in window.actions)
        result.append(actions[0] if len(actions) == 1 else Overlap(actions))
    return tuple(result)


def _agreement(plan: Plan) -> Iterator[Fault]:
    """Job, schedule and orders are about the same work."""
    job, schedule = plan.job, plan.schedule
    for what, of_job, of_schedule in (
        ("stages", len(job.stages), schedule.stages),
        ("microbatches", job.microbatches, schedule.microbatches),
    ):
        if of_job != of_schedule:
            is_for = f"is for {of_schedule} {what}, but the job has {of_job}"
            yield Fault(None, "schedule", is_for, f"Make the schedule for {of_job} {what}")
    for rank in range(plan.ranks):
        runs, slots = _slots(plan, rank), schedule.orders[rank]
        if runs == slots:
            continue
        at = next(
            (k for k, (run, slot) in enumerate(zip(runs, slots)) if run != slot), min(len(runs), len(slots))
        )
        does, says = (str(result[at]) if at < len(result) else "nothing" for result in (runs, slots))
        yield Fault(
            rank, does, f"run {at} of the order is {does}, but the schedule says {says}", "Lower it again"
        )
