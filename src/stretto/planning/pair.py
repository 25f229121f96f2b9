"""Schedules made of others: forwards share windows with backwards, several stages are one.

Within one action little can hide a collective, since the next op mostly needs its result. The ops of another
microbatch need nothing of it. So a forward that follows a backward on the same rank is joined with it in one
slot, (F;B)OVERLAP_F_B, and their ops are ordered together.

    1. Forwards move ahead: by one position, over the backward that they are joined with; by more where
       `ahead` says so. A pair waits for messages of both its actions, and with 1F1B's warm-up a stage's pair
       would wait for a pair of the next stage that waits for this stage's last pair: each would be idle half
       of the time. With one more forward for every stage behind it, they need not wait.
    2. Every forward joins the backward actions directly before it; I and W of one microbatch become B.

A few microbatches more are live on a stage that pairs: `stretto.schedule.timing.peak_live` counts them.
Backwards keep their order, so gradients are summed as they were. That no pair waits for itself by way of
other ranks is proved on the lowered plan.

`full` puts all actions of a rank in one window, of all its stages, forwards and backwards of one microbatch
too, I and W as the schedule has them.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot

Groups = tuple[tuple[int, ...], ...]
"""Stages that are one to a schedule, in order."""


def pair(schedule: Schedule, *, ahead: int = 0) -> Schedule | None:
    """The schedule in pairs; None when there is nothing to join, or when its slots are overlapped already.

    ahead: forwards that each rank runs earlier for every rank behind it, besides the one that joins.
    """
    if any(isinstance(slot, Overlap) for order in schedule.orders for slot in order):
        return None
    orders = []
    joined = False
    for rank, order in enumerate(schedule.orders):
        actions = [action for slot in order for action in slot.actions]
        slots = _join(_ahead(actions, ahead * (schedule.ranks - 1 - rank)))
        joined = joined or any(isinstance(slot, Overlap) for slot in slots)
        orders.append(tuple(slots))
    return replace(schedule, orders=tuple(orders)) if joined else None


def full(schedule: Schedule) -> Schedule | None:
    """The schedule with one window for each rank; None where a rank has a single action."""
    actions = [tuple(action for slot in order for action in slot.actions) for order in schedule.orders]
    if min(map(len, actions)) < 2:
        return None
    return replace(schedule, orders=tuple((Overlap(own),) for own in actions))


def apart(schedule: Schedule) -> Schedule:
    """The schedule with every action in a slot of its own."""
    orders = (tuple(action for slot in order for action in slot.actions) for order in schedule.orders)
    return replace(schedule, orders=tuple(orders))


def frees(order: Sequence[Slot], more: int = 0) -> list[tuple[int, int]]:
    """(a backward action, a later forward), by their positions in a rank's order.

    If each such forward begins when the backward is done, then in any order of the actions the rank, and each
    of its stages, keeps at most `more` live microbatches more than in this one.
    """
    actions = [action for slot in order for action in slot.actions]
    stages = [*dict.fromkeys(action.stage for action in actions)]
    kept = {pair for stage in stages for pair in _frees(actions, [stage], more)}
    return sorted(kept | set(_frees(actions, stages, more)))


def _frees(actions: Sequence[Action], stages: Sequence[int], more: int) -> Iterator[tuple[int, int]]:
    """Of some stages, counted together: if n microbatches are live at most in this order, the
    (k + n + more)-th forward begins when the k-th backward is done."""
    forwards = [at for at, one in enumerate(actions) if one.phase is Phase.F and one.stage in stages]
    backwards: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, one in enumerate(actions):
        if one.phase is not Phase.F and one.stage in stages:
            backwards[one.stage, one.microbatch].append(at)
    parts = sorted(backwards.values(), key=max)
    done = [max(own) for own in parts]
    most = max((nth + 1 - bisect(done, at) for nth, at in enumerate(forwards)), default=0)
    for own, forward in zip(parts, forwards[most + more :], strict=False):
        yield from ((backward, forward) for backward in own)


def _ahead(actions: Sequence[Action], by: int) -> list[Action]:
    """Step 1: the k-th forward goes where the (k - by)-th was; the rest keeps its order."""
    forwards = [action for action in actions if action.phase is Phase.F]
    result: list[Action] = []
    seen = 0
    for action in actions:
        if action.phase is Phase.F:
            result += forwards[seen + by if seen else 0 : seen + by + 1]
            seen += 1
        else:
            result.append(action)
    return result


def _join(actions: Sequence[Action]) -> list[Slot]:
    """Step 2."""
    slots: list[Slot] = []
    group: list[Action] = []
    for action in actions:
        if action.phase is not Phase.F:
            group.append(action)
        elif group:
            slots.append(Overlap((action, *_backwards(group))))
            group = []
        else:
            slots.append(action)
    return [*slots, *group]


def _backwards(group: Sequence[Action]) -> list[Action]:
    """The backward actions, with I and W of one stage and microbatch as B: one needs the other, so they are
    no two parts of a window."""
    there = {(a.stage, a.phase, a.microbatch) for a in group}
    result: list[Action] = []
    for action in group:
        stage, microbatch = action.stage, action.microbatch
        if action.phase is Phase.W and (stage, Phase.I, microbatch) in there:
            continue
        if action.phase is Phase.I and (stage, Phase.W, microbatch) in there:
            action = Action(stage, Phase.B, microbatch)
        result.append(action)
    return result


def equal_groups(stages: int, count: int) -> Groups:
    """So many groups, none of which has two stages more than another."""
    ends = [at * stages // count for at in range(count + 1)]
    return tuple(tuple(range(first, end)) for first, end in pairwise(ends))


def of_stages(schedule: Schedule, groups: Groups) -> Schedule:
    """A schedule of groups as one of their stages: forwards go up through a group, backwards down."""
    if all(len(group) == 1 for group in groups):
        return schedule

    def parts(action: Action) -> list[Action]:
        group = groups[action.stage]
        return [
            replace(action, stage=stage) for stage in (group if action.phase is Phase.F else reversed(group))
        ]

    def slots(slot: Slot) -> list[Slot]:
        if isinstance(slot, Overlap):
            return [Overlap(tuple(part for action in slot.actions for part in parts(action)))]
        return [*parts(slot)]

    return replace(
        schedule,
        stages=sum(map(len, groups)),
        stage_ranks=tuple(schedule.stage_ranks[at] for at, group in enumerate(groups) for _ in group),
        orders=tuple(tuple(one for slot in order for one in slots(slot)) for order in schedule.orders),
    )
