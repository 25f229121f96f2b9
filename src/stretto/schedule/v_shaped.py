"""Families with two stages a rank in a V: ZB-V, V-Half, V-Min and DualPipeV.

Rank r of p has stage r, on the way there, and stage 2p - 1 - r, on the way back: all ranks have equally
much. V-Half and V-Min repeat a *building block* (arXiv 2405.15362): a slot of time for each action of a
microbatch, the same for all microbatches, six slots apart. From rank to rank, V-Min takes one slot in all
four of its ways (F there, F back, I there, I back), V-Half two slots on the ways there: a third and a half of
1F1B's memory. Where p would make two of a rank's actions meet in a slot, the ways of I begin later (V-Min:
two slots where p is a multiple of 3; V-Half: three where p is even). Slots give the order of forwards and
input gradients; a weight gradient runs where the next of these is not ready, or where memory asks for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot
from stretto.ir.stage_maps import v
from stretto.schedule.family import Family, ScheduleShape, first_microbatches
from stretto.schedule.list_schedule import ActionWalk, Room, limited

ACTIONS_OF_A_MICROBATCH = 6
"""F, I and W of two stages: the slots that a building block takes on every rank."""

Slots = tuple[int, int, int, int]
"""When a rank runs a microbatch's F there, F back, I there (of the stage of the way back), I back."""


def _v_min(ranks: int, rank: int) -> Slots:
    later = 2 if ranks % 3 == 0 else 0
    there = 2 * ranks + later + rank
    return rank, 2 * ranks - 1 - rank, there, 4 * ranks + later - 1 - rank


def _v_half(ranks: int, rank: int) -> Slots:
    later = 3 if ranks % 2 == 0 else 0
    there = 3 * ranks + later - 1 + 2 * rank
    return 2 * rank, 3 * ranks - 2 - rank, there, 6 * ranks + later - 2 - rank


def _repeated(
    slots_of: Callable[[int, int], Slots], shares: Callable[[int], int]
) -> Callable[[ScheduleShape], Schedule]:
    """shares(ranks): the most microbatches that are live on a rank, where each is on both of its stages."""

    def build(wanted: ScheduleShape) -> Schedule:
        ranks = wanted.ranks
        stage_ranks = v(ranks, 2)
        slots = [slots_of(ranks, rank) for rank in range(ranks)]

        def urgency(action: Action) -> float:
            back = action.stage >= ranks
            forward, backward = (1, 2) if back else (0, 3)
            at = slots[stage_ranks[action.stage]][forward if action.phase is Phase.F else backward]
            return ACTIONS_OF_A_MICROBATCH * action.microbatch + at

        room = Room.even(ranks, wanted.stages, shares(ranks))
        orders = ActionWalk(stage_ranks, wanted.microbatches, urgency, room=room, in_turn=True).orders()
        assert orders is not None, "a block's slots keep its memory"
        made = Schedule("", wanted.stages, wanted.microbatches, stage_ranks, orders)
        return limited(made, wanted.max_live)

    return build


def _zb_v(wanted: ScheduleShape) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6), on rank r of p, F and f the forwards there and back, likewise I, i
    and W, w:

    1. 2(p - r) - 1 of F, then r of f F, then p - r of f i w: gradients come as soon as the pipeline is full;
    2. F I W f i w in turn while there are forwards;
    3. r of I i, then I W in turn, then the weight gradients that are left.

    No rank is idle between its first and its last action where F, I and W take equally long and messages no
    time. The way is made for 2p - 1 microbatches or more; of fewer, it is their part of it.
    """
    microbatches = max(wanted.microbatches, 2 * wanted.ranks - 1)
    orders = tuple(_zb_v_order(wanted.ranks, rank, microbatches) for rank in range(wanted.ranks))
    made = Schedule("", wanted.stages, microbatches, v(wanted.ranks, 2), orders)
    return limited(first_microbatches(made, wanted.microbatches), wanted.max_live)


def _zb_v_order(p: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    there, back = rank, 2 * p - 1 - rank
    order: list[Action] = []
    count = {(stage, phase): 0 for stage in (there, back) for phase in (Phase.F, Phase.I, Phase.W)}

    def run(stage: int, *phases: Phase) -> None:
        for phase in phases:
            if count[stage, phase] < microbatches:
                order.append(Action(stage, phase, count[stage, phase]))
                count[stage, phase] += 1

    for _ in range(2 * (p - rank) - 1):  # 1
        run(there, Phase.F)
    for _ in range(rank):
        run(back, Phase.F)
        run(there, Phase.F)
    for _ in range(p - rank):
        run(back, Phase.F, Phase.I, Phase.W)
    while count[back, Phase.F] < microbatches:  # 2
        run(there, Phase.F, Phase.I, Phase.W)
        run(back, Phase.F, Phase.I, Phase.W)
    for _ in range(rank):  # 3
        run(there, Phase.I)
        run(back, Phase.I)
    while count[there, Phase.I] < microbatches:
        run(there, Phase.I, Phase.W)
    for stage in (back, there):
        while count[stage, Phase.W] < microbatches:
            run(stage, Phase.W)
    return tuple(order)


def _dualpipev(wanted: ScheduleShape) -> Schedule:
    """DeepSeek's DualPipe (arXiv 2412.19437) feeds microbatches into a pipeline from both ends, and so has
    every stage twice; folded in its middle it is a V with two stages a rank, and has each once. Rank r of p
    has stage r, on the way there, and 2p - 1 - r, on the way back. F and f are forwards there and back, B and
    b backwards; I, i and W, w their halves, where B is split; [F b] is one overlapped slot.

    1. 2(p - 1 - r) of F;
    2. r + 1 of F f;
    3. p - 1 - r of i w f;
    4. m - 2p + r + 1 of [F b] [f B], the first F b of the last rank one after the other: it waits for no one;
    5. p - 1 - r of b [f B];
    6. r + 1 of b B, the second half of them split, i or I: what others wait for goes before W;
    7. p - 1 - r of a W that is left and I;
    8. the W that are left.

    W are done in the order in which their I were. The pattern needs m of at least 2p; for fewer microbatches
    the rest of it is left out.
    """
    microbatches = max(wanted.microbatches, wanted.stages)
    orders = tuple(_dualpipev_order(wanted.ranks, rank, microbatches) for rank in range(wanted.ranks))
    made = Schedule("", wanted.stages, microbatches, v(wanted.ranks, 2), orders)
    return first_microbatches(made, wanted.microbatches)


def _dualpipev_order(p: int, rank: int, microbatches: int) -> tuple[Slot, ...]:
    """The steps of `_dualpipev`."""
    there, back = rank, 2 * p - 1 - rank
    order: list[Slot] = []
    forwards, backwards = {there: 0, back: 0}, {there: 0, back: 0}
    left: deque[Action] = deque()

    def forward(stage: int) -> Action:
        forwards[stage] += 1
        return Action(stage, Phase.F, forwards[stage] - 1)

    def backward(stage: int, split: bool = False) -> Action:
        k = backwards[stage]
        backwards[stage] += 1
        if split:
            left.append(Action(stage, Phase.W, k))
        return Action(stage, Phase.I if split else Phase.B, k)

    def weight() -> list[Action]:
        return [left.popleft()] if left else []

    after = p - 1 - rank
    order += [forward(there) for _ in range(2 * after)]  # 1
    for _ in range(rank + 1):  # 2
        order += [forward(there), forward(back)]
    for _ in range(after):  # 3
        order += [backward(back, split=True), *weight(), forward(back)]
    for at in range(microbatches - 2 * p + rank + 1):  # 4
        pair = forward(there), backward(back)
        order += pair if at == 0 and after == 0 else [Overlap(pair)]
        order.append(Overlap((forward(back), backward(there))))
    for _ in range(after):  # 5
        order += [backward(back), Overlap((forward(back), backward(there)))]
    for at, stage in enumerate((back, there) * (rank + 1)):  # 6
        order.append(backward(stage, split=at > rank))
    for _ in range(after):  # 7
        order += [*weight(), backward(there, split=True)]
    while left:  # 8
        order += weight()
    return tuple(order)


V_SHAPED = (
    Family(
        "zb-v",
        _zb_v,
        "two stages a rank in a V, backward split; no bubble when F, I and W are equal; 1F1B's memory",
        "Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
    ),
    # Live on a rank: (p + 2) // 2 microbatches, where 1F1B's first rank has p.
    Family(
        "v-half",
        _repeated(_v_half, lambda ranks: (ranks + 2) // 2),
        "two stages a rank in a V, backward split; half of 1F1B's memory, half of its bubble",
        "Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362",
    ),
    # Live on a rank: (p + 4) // 3 microbatches.
    Family(
        "v-min",
        _repeated(_v_min, lambda ranks: (ranks + 4) // 3),
        "two stages a rank in a V, backward split; a third of 1F1B's memory, two thirds of its bubble",
        "Pipeline Parallelism with Controllable Memory, NeurIPS 2024, arXiv 2405.15362",
    ),
    Family(
        "dualpipev",
        _dualpipev,
        "two stages a rank in a V, forwards overlapped with backwards; about twice 1F1B's memory",
        "DualPipe of DeepSeek-V3, arXiv 2412.19437, cut in half by its authors' repository",
        keeps_any_limit=False,
    ),
)
