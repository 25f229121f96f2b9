"""Orders of actions: the families, their text form, their timing and their drawings.

This room knows `stretto.ir` and nothing above it. A family knows stages and microbatches, never ops.
`register` makes a family of one's own known; `docs/schedules.md` shows how.
"""

from stretto.ir.action import Action, Overlap, Phase, Schedule
from stretto.ir.stage_maps import Places
from stretto.schedule.families import FAMILIES, make_schedule, register
from stretto.schedule.family import Family, ScheduleShape

__all__ = [
    "FAMILIES",
    "Action",
    "Family",
    "Overlap",
    "Phase",
    "Places",
    "Schedule",
    "ScheduleShape",
    "make_schedule",
    "register",
]
