"""The schedule families: functions from (ranks, microbatches, limits) to an order of actions a rank.

A family knows nothing of ops or devices. In those of Stretto, the forwards, the input gradients and the
weight gradients of every stage each go through the microbatches in ascending order, so that gradients are
summed in one order whatever the family. One that a user registers may take any order that progresses.

A microbatch is *live* on a stage from the end of its forward to the end of its last backward action (W where
the backward is split, else B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from stretto.errors import PlanError, StrettoError, UsageError
from stretto.ir.action import Action, Phase, Schedule
from stretto.ir.limits import MOST_ACTIONS
from stretto.ir.stage_maps import (
    AUTO,
    ONE_EACH,
    STAGE_MAPS,
    StageMap,
    stage_map_of,
    unknown_schedule,
    virtual_stages_of,
)
from stretto.schedule.family import Family, ScheduleShape
from stretto.schedule.loops import LOOPS
from stretto.schedule.timing import peak_live, time_schedule
from stretto.schedule.v_shaped import V_SHAPED

_ROWS = {row.name: row for row in (*LOOPS, *V_SHAPED)}
_APART = sorted(_ROWS.keys() ^ STAGE_MAPS.keys())
assert not _APART, f"{_APART}: a family has its row in schedule/, and its name in ir/stage_maps.STAGE_MAPS"

FAMILIES: dict[str, Family] = {name: _ROWS[name] for name in STAGE_MAPS}
"""Every family by its name, in the order of `STAGE_MAPS`."""

BUILT_IN = frozenset(FAMILIES)
"""The families of Stretto."""

PLAIN, PLAIN_OF_SEVERAL = "1f1b", "interleaved-1f1b"
"""The family where only the layout matters, with one stage a rank and with any number of them."""


def register(
    name: str,
    build: Callable[[ScheduleShape], Schedule],
    *,
    places: StageMap = ONE_EACH,
    keeps_any_limit: bool = False,
) -> None:
    """Make a family of your own known under `name`: for `Parallel(schedule=name)` and settings, for plans,
    tuning, and the search of "auto".

    build: makes the schedule, from the numbers that it is given alone, in any order that progresses. places:
    where its stages are, and how many a rank can have; one by default. keeps_any_limit: of live
    microbatches; else none below what it has without one.

    Raises UsageError when Stretto has a family of that name (a user's own is replaced), for a name that no
    family can have, and for what cannot be called.
    """
    if not isinstance(name, str) or not name or name == AUTO or name.endswith(".csv"):
        raise UsageError(f"{name!r} is no name of a schedule family: register(name, build)")
    if name in BUILT_IN:
        raise UsageError(f"Stretto has a schedule family {name!r}: register yours under another name")
    if not callable(build):
        raise UsageError(
            f"schedule family {name!r} is {build!r:.60}, which cannot be called: give a function"
        )
    STAGE_MAPS[name] = places
    made = partial(_checked, name, build)
    FAMILIES[name] = Family(name, made, "registered by the user", "your own", keeps_any_limit)


def _checked(name: str, build: Callable[[ScheduleShape], Schedule], wanted: ScheduleShape) -> Schedule:
    """What a user's family makes. Raises UsageError where it fails, or is not what was wanted."""
    where = f"schedule family {name!r}, {wanted}"
    try:
        made = build(wanted)
    except StrettoError:
        raise
    except Exception as error:
        raise UsageError(f"{where}: it fails with {type(error).__name__}: {error}") from error
    if not isinstance(made, Schedule):
        raise UsageError(f"{where}: it gives {made!r:.60}; give a stretto.schedule.Schedule")
    places = stage_map_of(name).stage_ranks(wanted.ranks, wanted.virtual_stages)
    for what, has, wants in (
        ("ranks", made.ranks, wanted.ranks),
        ("stages", made.stages, wanted.stages),
        ("microbatches", made.microbatches, wanted.microbatches),
        ("stage_ranks", made.stage_ranks, places),
    ):
        if has != wants:
            raise UsageError(f"{where}: its schedule has {what} = {has}, and {wants} is wanted")
    try:
        time_schedule(made)
    except PlanError as error:
        raise UsageError(f"{where}: {error}") from None
    return made


def make_schedule(
    family: str,
    ranks: int,
    microbatches: int,
    *,
    virtual_stages: int | None = None,
    max_live: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Make a family's schedule for so many pipeline ranks.

    virtual_stages: stages a rank; None is what the family needs (1, or 2). max_live: the most live
    microbatches that a stage may keep; None leaves the family its own number. group: how many microbatches go
    through one of a rank's stages before its next begins, in interleaved families; None leaves it to the
    family. `AUTO` is no family: `stretto.schedule.search` makes it, for given times.

    Raises UsageError for an unknown family, for a number below 1, for stages a rank that the family cannot
    have, for a limit that it cannot keep, and for groups with which ranks would wait for each other forever;
    the message names the nearest number that it can.
    """
    if family == AUTO:
        raise UsageError("schedule 'auto' is chosen for given times: stretto.schedule.search, or a plan")
    if family not in FAMILIES:
        raise UsageError(unknown_schedule(family) or f"{family!r} is a file: stretto.schedule.csv reads it")
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages a rank": virtual_stages, "group": group}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; a schedule needs at least 1")
    result = FAMILIES[family]
    each = virtual_stages_of(family, virtual_stages)
    check_count(ranks * each, microbatches)
    wanted = ScheduleShape(ranks, each, microbatches, max_live, group)
    if group is not None and not result.groups:
        grouped = ", ".join(one.name for one in FAMILIES.values() if one.groups)
        raise UsageError(f"family {family!r} has no groups of microbatches: drop group, or choose {grouped}")
    if max_live is not None:
        _check_limit(result, wanted, max_live)
    if group is not None:
        _check_group(result, wanted, group)
    return replace(result.build(wanted), family=family)


def check_count(stages: int, microbatches: int) -> None:
    """Raises UsageError for more actions than a schedule is made of."""
    if stages * microbatches > MOST_ACTIONS:
        raise UsageError(
            f"{stages:,} stages times {microbatches:,} microbatches are more than {MOST_ACTIONS:,}, the most "
            "that a schedule is made of: give fewer of one of them"
        )


def _check_limit(family: Family, wanted: ScheduleShape, max_live: int) -> None:
    free = replace(wanted, max_live=None)
    least = 1 if family.keeps_any_limit else max(peak_live(family.build(free)))
    if max_live < least:
        raise UsageError(
            f"family {family.name!r} cannot keep max_live={max_live} with {wanted.stages} stages and "
            f"{wanted.microbatches} microbatches: its minimum is {least}. Raise max_live"
            + (" or choose a family that alternates forward and backward, such as 1f1b" if least > 1 else "")
        )


def _check_group(family: Family, wanted: ScheduleShape, group: int) -> None:
    if _progresses(family, wanted):
        return
    others = sorted(range(1, wanted.microbatches + 1), key=lambda size: abs(size - group))
    nearest = next(size for size in others if _progresses(family, replace(wanted, group=size)))
    raise UsageError(
        f"family {family.name!r} cannot have groups of {group} of {wanted.microbatches} microbatches on "
        f"{wanted.ranks} ranks with {wanted.virtual_stages} stages each: ranks would wait for each other "
        f"forever. Give {nearest}, or no group"
    )


def _progresses(family: Family, wanted: ScheduleShape) -> bool:
    try:
        time_schedule(family.build(wanted))
    except PlanError:
        return False
    return True


def forward_schedule(stages: int, microbatches: int, stage_ranks: Sequence[int] | None = None) -> Schedule:
    """The order of a job that has no backward: F of each microbatch in turn through the rank's stages.
    stage_ranks: as in the training's schedule; stage i on rank i by default."""
    places = tuple(stage_ranks) if stage_ranks is not None else tuple(range(stages))
    orders = tuple(
        tuple(
            Action(stage, Phase.F, microbatch)
            for microbatch in range(microbatches)
            for stage in range(stages)
            if places[stage] == rank
        )
        for rank in range(max(places) + 1)
    )
    return Schedule("forward", stages, microbatches, places, orders)
