"""Where stages are: the maps from stages to ranks, and which map and how many stages a rank a family has.

A rank may have several stages, *virtual stages* (Megatron-LM calls them model chunks). Capturing needs their
number, and schedules need their ranks, so the table is here, below both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stretto.errors import UsageError, meant
from stretto.ir.action import Schedule


def loop(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage, where a microbatch goes round and round: 0 1 2, 0 1 2."""
    return tuple(range(ranks)) * virtual_stages


def v(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The rank of each stage, where it goes there and back: 0 1 2, 2 1 0."""
    there = tuple(range(ranks))
    return tuple(rank for nth in range(virtual_stages) for rank in (there[::-1] if nth % 2 else there))


@dataclass(frozen=True, slots=True)
class StageMap:
    """Where a family's stages are.

    usual: stages a rank where no one asks for another number. least, most: the numbers that it can have; None
    is any.
    """

    map: Literal["loop", "v"] = "loop"
    usual: int = 1
    least: int = 1
    most: int | None = 1

    def allow(self, virtual_stages: int) -> bool:
        """Whether each rank may have so many stages."""
        return self.least <= virtual_stages and (self.most is None or virtual_stages <= self.most)

    def nearest(self, virtual_stages: int) -> int:
        """The nearest number of stages that a rank may have."""
        wanted = max(self.least, virtual_stages)
        return wanted if self.most is None else min(self.most, wanted)

    def stage_ranks(self, ranks: int, virtual_stages: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return (loop if self.map == "loop" else v)(ranks, virtual_stages)


AUTO = "auto"
"""In place of a family's name: the one, or the order, that is found to be the fastest."""

ONE_EACH = StageMap()
_LOOPED = StageMap("loop", usual=2, most=None)
_V = StageMap("v", usual=2, least=2, most=2)

STAGE_MAPS: dict[str, StageMap] = {
    **dict.fromkeys(("gpipe", "1f1b", "eager-1f1b", "eager-1f1b-split", "zb-h1", "zb-h2"), ONE_EACH),
    "interleaved-1f1b": _LOOPED,
    "eager-interleaved-1f1b": _LOOPED,
    "looped-bfs": _LOOPED,
    "zb-v": _V,
    "v-half": _V,
    "v-min": _V,
    "dualpipev": _V,
}
"""The names of all families, in the order in which they are listed to users. Each of Stretto's has a row in
`schedule/loops.py` or `schedule/v_shaped.py`; users add theirs (`stretto.schedule.register`)."""


def unknown_schedule(name: str | Schedule) -> str:
    """What to say of a name that is no schedule's; "" for a family's, `AUTO`, and for orders of your own."""
    known = (*STAGE_MAPS, AUTO)
    if is_own(name) or name in known:
        return ""
    return f"unknown schedule family {name!r}; {meant(name, known)}choose one of: {', '.join(known)}"


def stage_map_of(family: str) -> StageMap:
    """Where the family's stages are. `AUTO` goes with any number of stages, and with all maps of them.

    Raises UsageError for a family that there is not.
    """
    if fault := unknown_schedule(family):
        raise UsageError(fault)
    return StageMap(most=None) if family == AUTO else STAGE_MAPS[family]


def is_own(schedule: str | Schedule) -> bool:
    """Whether an order is given itself, or as the path of a CSV, in place of a family's name."""
    return isinstance(schedule, Schedule) or schedule.endswith(".csv")


def virtual_stages_of(schedule: str | Schedule, asked: int | None) -> int:
    """Stages a rank, for a family's name or an order of your own; asked: what the user wants, None for what
    is usual.

    Raises UsageError for a number that the family cannot have; it names the nearest that it can.
    """
    if isinstance(schedule, Schedule) or is_own(schedule):
        return asked or 1
    places = stage_map_of(schedule)
    if asked is None:
        return places.usual
    if not places.allow(asked):
        raise UsageError(
            f"{_has(schedule)}, not virtual_stages = {asked}: give virtual_stages = {places.nearest(asked)}, "
            f"or leave it out, or choose a schedule with any number of them ({_several()})"
        )
    return asked


def stage_ranks_of(schedule: str | Schedule, ranks: int, stages: int) -> tuple[int, ...] | None:
    """The rank of each stage, before an order is made; None where ranks have unequally many stages. `AUTO`
    and orders in files count as the loop: their map is found later."""
    if isinstance(schedule, Schedule):
        return schedule.stage_ranks if schedule.stages == stages else None
    each, left = divmod(stages, ranks)
    places = ONE_EACH if is_own(schedule) else stage_map_of(schedule)
    return None if left else places.stage_ranks(ranks, each)


def shared(stages: int, ranks: int | None, schedule: str) -> tuple[int, int]:
    """How many ranks a family's schedule has for so many stages, and how many stages each. ranks: that the
    user wants; None for what is usual.

    Raises UsageError for stages that the family cannot share out; it names the nearest number that it can.
    """
    places = stage_map_of(schedule)
    result = max(stages // places.usual, 1) if ranks is None else ranks
    each, left = divmod(stages, result)
    if not left and places.allow(each):
        return result, each
    near = min(
        (result * places.nearest(each + more) for more in (0, 1)), key=lambda count: abs(count - stages)
    )
    raise UsageError(
        f"the job has {stages} stages for pp = {result} ranks, and {_has(schedule)}, on each equally many: "
        f"capture with {near} stages (virtual_stages = {near // result}, or as many in split), choose a "
        f"schedule with any number a rank ({_several()}), or give one of your own (.csv)"
    )


def _has(schedule: str) -> str:
    usual = stage_map_of(schedule).usual
    return f"schedule {schedule!r} has {usual} stage{'s' if usual > 1 else ''} a rank"


def _several() -> str:
    """Families with any number of stages a rank."""
    return ", ".join(name for name, one in STAGE_MAPS.items() if one.most is None)
