"""DualPipeV: two stages a rank in a V, forwards of one stage overlapped with backwards of the other.

DeepSeek's DualPipe (arXiv 2412.19437) feeds microbatches into a pipeline from both ends, and so holds every
stage twice; folded in its middle it is a V with two stages a rank, and holds each once. Rank r of p has stage
r, on the way there, and 2p - 1 - r, on the way back. F and f are forwards there and back, B and b backwards;
I, i and W, w their halves, where B is split; [F b] is one overlapped slot.

1. 2(p - 1 - r) of F;
2. r + 1 of F f;
3. p - 1 - r of i w f;
4. m - 2p + r + 1 of [F b] [f B], the first F b of the last rank one after the other: it waits for nobody;
5. p - 1 - r of b [f B];
6. r + 1 of b B, the second half of them split, i or I: what others wait for goes before W;
7. p - 1 - r of a W that is left and I;
8. the W that are left.

W are done in the order in which their I were. The pattern needs m of at least 2p; for fewer microbatches the
rest of it is left out.

Touches `stretto.ir` and the room of timing.
"""

from __future__ import annotations

from collections import deque

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot
from stretto.ir.stage_maps import v
from stretto.schedule.family import Family, Wanted, first_microbatches
from stretto.schedule.timing import peak_live


def _dualpipev(wanted: Wanted) -> Schedule:
    microbatches = max(wanted.microbatches, wanted.stages)
    orders = tuple(_order(wanted.ranks, rank, microbatches) for rank in range(wanted.ranks))
    made = Schedule("dualpipev", wanted.stages, microbatches, v(wanted.ranks, 2), orders)
    return first_microbatches(made, wanted.microbatches)


def _order(p: int, rank: int, microbatches: int) -> tuple[Slot, ...]:
    """The steps of the module's docstring."""
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


DUALPIPE = (
    Family(
        "dualpipev",
        _dualpipev,
        "two stages a rank in a V, forwards overlapped with backwards; about twice 1F1B's memory",
        "DualPipe of DeepSeek-V3, arXiv 2412.19437, cut in half by its authors' repository",
        lambda wanted: max(peak_live(_dualpipev(wanted))),
    ),
)
"""In the order in which they are listed to users."""
