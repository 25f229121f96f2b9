"""The schedule families: functions from (ranks, microbatches, limits) to an order of actions a rank.

A family knows nothing of ops or devices; it may touch `stretto.ir` and this folder only. On every stage the
forwards, the input gradients and the weight gradients each go through the microbatches in ascending order, so
that gradients are summed in one order whatever the family.

A microbatch is *live* on a stage from the end of its forward to the end of its last backward action (W where
the backward is split, else B).
"""

from __future__ import annotations

from dataclasses import replace

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Schedule
from stretto.ir.stage_maps import AUTO, virtual_stages_of
from stretto.schedule.dualpipe import DUALPIPE
from stretto.schedule.family import Family, Wanted
from stretto.schedule.interleaved import INTERLEAVED
from stretto.schedule.one_stage import ONE_STAGE
from stretto.schedule.timing import time_schedule
from stretto.schedule.v_shaped import V_SHAPED

FAMILIES: dict[str, Family] = {
    family.name: family for family in (*ONE_STAGE, *INTERLEAVED, *V_SHAPED, *DUALPIPE)
}
"""Every family by its name; the order is the one in which they are listed to users."""


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
    microbatches that a stage may hold; None leaves the family its own number. group: how many microbatches go
    through one of a rank's stages before its next begins, in interleaved families; None leaves it to the
    family. `AUTO` is no family: `stretto.schedule.search` makes it, for given times.

    Raises UsageError for an unknown family, for a number below 1, for stages a rank that the family cannot
    have, for a limit that it cannot keep, and for groups with which ranks would wait for each other for ever;
    the message names the nearest number that it can.
    """
    if family not in FAMILIES:
        if family == AUTO:
            raise UsageError("schedule 'auto' is chosen for given times: stretto.schedule.search, or a plan")
        raise UsageError(f"unknown schedule family {family!r}; choose one of: {', '.join((*FAMILIES, AUTO))}")
    numbers = {"ranks": ranks, "microbatches": microbatches, "stages a rank": virtual_stages, "group": group}
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} is {value}; a schedule needs at least 1")
    found = FAMILIES[family]
    each = virtual_stages_of(family, virtual_stages)
    wanted = Wanted(ranks, each, microbatches, max_live, group)
    if group is not None and not found.groups:
        grouped = ", ".join(one.name for one in FAMILIES.values() if one.groups)
        raise UsageError(f"family {family!r} has no groups of microbatches: drop group, or choose {grouped}")
    if max_live is not None:
        _check_limit(found, wanted, max_live)
    if group is not None:
        _check_group(found, wanted, group)
    return found.build(wanted)


def _check_limit(family: Family, wanted: Wanted, max_live: int) -> None:
    least = family.min_live(replace(wanted, max_live=None))
    if max_live < least:
        raise UsageError(
            f"family {family.name!r} cannot keep max_live={max_live} with {wanted.stages} stages and "
            f"{wanted.microbatches} microbatches: its minimum is {least}. Raise max_live"
            + (" or choose a family that alternates forward and backward, such as 1f1b" if least > 1 else "")
        )


def _check_group(family: Family, wanted: Wanted, group: int) -> None:
    if _progresses(family, wanted):
        return
    others = sorted(range(1, wanted.microbatches + 1), key=lambda size: abs(size - group))
    nearest = next(size for size in others if _progresses(family, replace(wanted, group=size)))
    raise UsageError(
        f"family {family.name!r} cannot have groups of {group} of {wanted.microbatches} microbatches on "
        f"{wanted.ranks} ranks with {wanted.virtual_stages} stages each: ranks would wait for each other "
        f"for ever. Give {nearest}, or no group"
    )


def _progresses(family: Family, wanted: Wanted) -> bool:
    try:
        time_schedule(family.build(wanted))
    except PlanError:
        return False
    return True
