"""Orders of actions: the families, their text form, their timing and their drawings.

This room knows `stretto.ir` and nothing above it. A family knows stages and microbatches, never ops.
`register` makes a family of your own known; `docs/schedules.md` shows how.
"""

from stretto.ir.action import Action, Overlap, Phase, Schedule
from stretto.ir.stage_maps import StageMap
from stretto.schedule.families import FAMILIES, make_schedule, register
from stretto.schedule.family import Family, ScheduleShape

__all__ = [
    "FAMILIES",
    "Action",
    "Family",
    "Overlap",
    "Phase",
    "Schedule",
    "ScheduleShape",
    "StageMap",
    "make_schedule",
    "register",
]
