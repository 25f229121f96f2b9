"""What a family of schedules is, for the rooms that have some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stretto.ir.action import Overlap, Schedule, Slot
from stretto.ir.stage_maps import StageMap, stage_map_of


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """What a schedule is asked for.

    virtual_stages: stages a rank. max_live: the most live microbatches of a stage; None leaves the family its
    own number. group: how many microbatches go through one of a rank's stages before its next one begins;
    None leaves it to the family.
    """

    ranks: int
    virtual_stages: int
    microbatches: int
    max_live: int | None = None
    group: int | None = None

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages


@dataclass(frozen=True, slots=True)
class Family:
    """A named way to order actions. In those of Stretto, F, I and W of each stage ascend.

    build: makes the schedule (call `make_schedule`, which checks the arguments and names it).
    keeps_any_limit: of live microbatches, else none below what it has without one. groups: whether it goes by
    groups of microbatches. eager: the family that sends forwards earlier.
    """

    name: str
    build: Callable[[ScheduleShape], Schedule]
    description: str
    source: str
    keeps_any_limit: bool = True
    groups: bool = False
    eager: str | None = None

    @property
    def places(self) -> StageMap:
        """Where its stages are, and how many a rank can have."""
        return stage_map_of(self.name)


def first_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without its later microbatches; of an overlap that loses one, what is left.

    What is legal stays so: no action needs one of another microbatch.
    """
    orders: list[tuple[Slot, ...]] = []
    for order in schedule.orders:
        slots: list[Slot] = []
        for slot in order:
            left = tuple(action for action in slot.actions if action.microbatch < microbatches)
            if len(left) == len(slot.actions):
                slots.append(slot)
            elif left:
                slots.append(Overlap(left) if len(left) > 1 else left[0])
        orders.append(tuple(slots))
    return replace(schedule, microbatches=microbatches, orders=tuple(orders))
