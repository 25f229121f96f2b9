"""Pairs: a schedule in which forwards share windows with the backwards of earlier microbatches.

Within one action little can hide a collective, since the next op mostly needs its result. The ops of another
microbatch need nothing of it. So a forward that follows a backward on the same rank is joined with it in one
slot, (F;B)OVERLAP_F_B, and their ops are ordered together.

    1. Forwards move ahead: by one place, over the backward that they are joined with; by more where `ahead`
       says so. A pair waits for messages of both its actions, and with 1F1B's warm-up a stage's pair would
       wait for a pair of the next stage that waits for this stage's last pair: each would stand half of the
       time. With one more forward for every stage behind it, they need not wait.
    2. Every forward joins the backward actions directly before it; I and W of one microbatch become B.
    3. With `ends`, what is left alone at the begin and at the end is joined, up to TOGETHER in a window.

A few microbatches more are live on a stage that pairs: `stretto.schedule.timing.peak_live` says how many.
Backwards keep their order, so gradients are summed as they were. That no pair waits for itself by way of
other ranks is proved on the lowered plan.

`whole` goes to the end of this way: all actions of a rank in one window, of all its stages, forwards and
backwards of one microbatch too, I and W as the schedule has them.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot

TOGETHER = 4
"""The most actions of one phase in a window (step 3): kinds of windows do not grow with the pipeline."""


def pair(schedule: Schedule, *, ahead: int = 0, ends: bool = False) -> Schedule | None:
    """The schedule in pairs; None when there is nothing to join, or when its slots are overlapped already.

    ahead: forwards that each rank runs earlier for every rank behind it, beside the one that joins. ends: see
    step 3.
    """
    if any(isinstance(slot, Overlap) for order in schedule.orders for slot in order):
        return None
    orders = []
    joined = False
    for rank, order in enumerate(schedule.orders):
        actions = [action for slot in order for action in slot.actions]
        # With one rank the warm-up is one forward, and one more keeps it company.
        more = int(ends and schedule.ranks == 1)
        slots = _join(_ahead(actions, ahead * (schedule.ranks - 1 - rank) + more))
        joined = joined or any(isinstance(slot, Overlap) for slot in slots)
        orders.append(_ends_joined(slots) if ends else tuple(slots))
    return replace(schedule, orders=tuple(orders)) if joined else None


def whole(schedule: Schedule) -> Schedule | None:
    """The schedule with one window for each rank; None for one with overlapped slots, and where a rank has a
    single action."""
    actions = [tuple(action for slot in order for action in slot.actions) for order in schedule.orders]
    for own, order in zip(actions, schedule.orders, strict=True):
        if len(own) < 2 or len(own) > len(order):
            return None
    return replace(schedule, orders=tuple((Overlap(own),) for own in actions))


def apart(schedule: Schedule) -> Schedule:
    """The schedule with every action in a slot of its own."""
    orders = (tuple(action for slot in order for action in slot.actions) for order in schedule.orders)
    return replace(schedule, orders=tuple(orders))


def frees(order: Sequence[Slot], more: int = 0) -> list[tuple[int, int]]:
    """(a backward action, a later forward), by their places in a rank's order.

    If each such forward begins when the backward is done, then in any order of the actions the rank, and each
    of its stages, holds at most `more` live microbatches more than in this one.
    """
    actions = [action for slot in order for action in slot.actions]
    places = [*dict.fromkeys(action.stage for action in actions)]
    found = {pair for stage in places for pair in _frees(actions, [stage], more)}
    return sorted(found | set(_frees(actions, places, more)))


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
    """Step 1: the k-th forward stands where the (k - by)-th stood; the rest keeps its order."""
    forwards = [action for action in actions if action.phase is Phase.F]
    result: list[Action] = []
    taken = 0
    seen = 0
    for action in actions:
        if action.phase is not Phase.F:
            result.append(action)
            continue
        seen += 1
        upto = min(len(forwards), seen + by)
        result += forwards[taken:upto]
        taken = upto
    return result


def _join(actions: Sequence[Action]) -> list[Slot]:
    """Step 2."""
    slots: list[Slot] = []
    group: list[Action] = []
    for action in actions:
        if action.phase is not Phase.F:
            group.append(action)
        elif group:
            slots.append(Overlap((action, *_whole(group))))
            group = []
        else:
            slots.append(action)
    return [*slots, *group]


def _ends_joined(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """Step 3."""
    pairs = [at for at, slot in enumerate(slots) if isinstance(slot, Overlap)]
    if not pairs:
        return tuple(slots)
    begin, end = pairs[0], pairs[-1] + 1
    # Where I and W are apart, one window for all would change the order in which gradients are summed.
    return (*_alone(slots[:begin], Phase.F), *slots[begin:end], *_alone(slots[end:], Phase.B))


def _alone(slots: Sequence[Slot], phase: Phase) -> Iterator[Slot]:
    """The slots, with those of one phase and stage that follow each other in few."""
    for kinds, run in groupby(slots, lambda slot: {(action.phase, action.stage) for action in slot.actions}):
        alike = list(run)
        together = TOGETHER if {found for found, _ in kinds} == {phase} else 1
        for at in range(0, len(alike), together):
            yield _one(alike[at : at + together])


def _one(slots: Sequence[Slot]) -> Slot:
    """One slot of the actions of several."""
    actions = tuple(action for slot in slots for action in slot.actions)
    return Overlap(actions) if len(actions) > 1 else actions[0]


def _whole(group: Sequence[Action]) -> list[Action]:
    """The backward actions, with I and W of one stage and microbatch as B: one needs the other, so they are
    no two parts of a window."""
    places = {(a.stage, a.phase, a.microbatch): a for a in group}
    whole: list[Action] = []
    for action in group:
        stage, microbatch = action.stage, action.microbatch
        if action.phase is Phase.W and (stage, Phase.I, microbatch) in places:
            continue
        if action.phase is Phase.I and (stage, Phase.W, microbatch) in places:
            action = Action(stage, Phase.B, microbatch)
        whole.append(action)
    return whole
