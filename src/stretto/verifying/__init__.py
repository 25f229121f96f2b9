"""Proofs: a schedule or a plan is shown to be free of faults, or refused with every fault that it has.

No device, no process, no time: only what the plan says.
"""

from __future__ import annotations

from stretto.errors import PlanError
from stretto.ir.action import Schedule
from stretto.ir.plan import Plan
from stretto.verifying.fault import Fault
from stretto.verifying.memory import memory_faults
from stretto.verifying.plan import plan_faults
from stretto.verifying.schedule import schedule_faults

__all__ = ["Fault", "plan_faults", "schedule_faults", "verify"]


def verify(plan_or_schedule: Plan | Schedule, max_bytes: int | None = None) -> None:
    """Raise PlanError that lists every fault, or return if there is none.

    max_bytes: for a plan, the memory of one rank in bytes; a rank that has more at any point of its order
    is a fault (see `stretto.verifying.memory` for what is counted).
    """
    if isinstance(plan_or_schedule, Schedule):
        faults = schedule_faults(plan_or_schedule)
        what = "the schedule cannot run"
    else:
        faults = plan_faults(plan_or_schedule)
        if not faults and max_bytes is not None:
            faults = memory_faults(plan_or_schedule, max_bytes)
        what = "the plan cannot run"
    if faults:
        raise PlanError(what, faults)
