"""Pairs: a schedule in which forwards share windows with the backwards of earlier microbatches.

Within one action little can hide a collective, since the next op mostly needs its result. The ops of another
microbatch need nothing of it. So a forward that follows a backward on the same rank is joined with it in one
slot, (F;B)OVERLAP_F_B, and their ops are ordered together.

    1. Forwards move ahead: by one place, over the backward that they are joined with; by more where `ahead`
       says so. A pair waits for messages of both its actions, and with 1F1B's warm-up a stage's pair would
       wait for a pair of the next stage that waits for this stage's last pair: each would stand half of the
       time. With one more forward for every stage behind it, they need not wait.
    2. Every forward joins the backward actions directly before it; I and W of one microbatch become B.
    3. With `ends`, what is left alone at the begin and the end is joined in twos: forwards with forwards,
       backwards with backwards.

A microbatch or two more are live on a stage that pairs: `stretto.schedule.timing.peak_live` says how many.
Backwards keep their order, so gradients are summed as they were. That no pair waits for itself by way of
other ranks is proved on the lowered plan. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot


def pair(schedule: Schedule, *, ahead: int = 0, ends: bool = False) -> Schedule | None:
    """The schedule in pairs; None when there is nothing to join, or when its slots are overlapped already.

    ahead: forwards that each rank runs earlier for every rank behind it, beside the one that joins. ends: see
    step 3; one more forward runs earlier, where else one would be left over.
    """
    if any(isinstance(slot, Overlap) for order in schedule.orders for slot in order):
        return None
    orders = []
    joined = False
    for rank, order in enumerate(schedule.orders):
        actions = [action for slot in order for action in slot.actions]
        earlier = ahead * (schedule.ranks - 1 - rank)
        slots = _join(_ahead(actions, earlier))
        if ends:
            if _warm_up(slots) % 2:
                slots = _join(_ahead(actions, earlier + 1))
            slots = _ends(slots)
        joined = joined or any(isinstance(slot, Overlap) for slot in slots)
        orders.append(tuple(slots))
    return replace(schedule, orders=tuple(orders)) if joined else None


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


def _warm_up(slots: Sequence[Slot]) -> int:
    """Forwards alone before the first slot that is something else."""
    alone = (at for at, slot in enumerate(slots) if not isinstance(slot, Action) or slot.phase is not Phase.F)
    return next(alone, len(slots))


def _ends(slots: Sequence[Slot]) -> list[Slot]:
    """Step 3: neighbours of one stage that both are forwards, or both whole backwards, as one slot."""
    found: list[Slot] = []
    for slot in slots:
        last = found[-1] if found else None
        if (
            isinstance(slot, Action)
            and isinstance(last, Action)
            and slot.phase is last.phase
            and slot.phase in (Phase.F, Phase.B)
            and slot.stage == last.stage
        ):
            found[-1] = Overlap((last, slot))
        else:
            found.append(slot)
    return found


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
