"""Families with several stages a rank in a loop: interleaved 1F1B, its eager form, and breadth first.

Stage s is on rank s modulo ranks: a microbatch goes round all ranks once for each stage that a rank has.

1. The forwards of a rank go group by group of microbatches: the group's microbatches through the rank's
   first stage, then through its second, and so on. Its backwards do the same from its last stage to its
   first.
2. Interleaved 1F1B is 1F1B over these two lists: a warm-up of forwards, a forward and a backward in turn,
   then the backwards that are left. The warm-up is what the first group runs before its last stage, and on
   top a number for every rank on the way to the last one and back.
3. Unless the user names a group, microbatches are shared equally by as many groups as there are of at least
   `ranks` microbatches each: with fewer in a group, a rank would wait for what has yet to come round. This is
   Megatron-LM's default where microbatches are a multiple of ranks, and PyTorch's where it accepts them.

A group that the user names is Megatron-LM's `--microbatch-group-size-per-virtual-pipeline-stage`: the last
one may be smaller, and then ranks may wait for each other for ever (`make_schedule` refuses that).

Touches `stretto.ir` and this folder's walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.ir.action import Action, Phase, Schedule
from stretto.ir.stage_maps import loop
from stretto.schedule.family import Family, ScheduleShape
from stretto.schedule.list_schedule import limited


def groups_of(microbatches: int, least: int, group: int | None = None) -> list[int]:
    """Sizes of the groups of microbatches: `group` and what is left, or equal shares of at least `least`."""
    if group is not None:
        return [min(group, microbatches - first) for first in range(0, microbatches, group)]
    count = max(1, microbatches // least)
    return [microbatches // count + (at < microbatches % count) for at in range(count)]


def visits(groups: Sequence[int], virtual_stages: int) -> list[tuple[int, int]]:
    """(microbatch, which of the rank's stages) in the order of step 1."""
    result: list[tuple[int, int]] = []
    first = 0
    for size in groups:
        result += [(k, nth) for nth in range(virtual_stages) for k in range(first, first + size)]
        first += size
    return result


def _schedule(
    name: str,
    wanted: ScheduleShape,
    groups: Sequence[int],
    warm_up_of: Callable[[int], int],
) -> Schedule:
    """Steps 1 and 2. warm_up_of(rank): forwards before the first that has a backward behind it."""
    ranks, each = wanted.ranks, wanted.virtual_stages
    visited = visits(groups, each)
    orders = []
    for rank in range(ranks):
        forwards = [Action(nth * ranks + rank, Phase.F, k) for k, nth in visited]
        backwards = [Action((each - 1 - nth) * ranks + rank, Phase.B, k) for k, nth in visited]
        warm_up = min(warm_up_of(rank), len(forwards))
        order = forwards[:warm_up]
        for at, backward in enumerate(backwards):
            order += forwards[warm_up + at : warm_up + at + 1]
            order.append(backward)
        orders.append(tuple(order))
    made = Schedule(name, wanted.stages, wanted.microbatches, loop(ranks, each), tuple(orders))
    return limited(made, wanted.max_live)


def _interleaved(name: str, groups_in_turn: int, per_rank: int) -> Callable[[ScheduleShape], Schedule]:
    """groups_in_turn: a group has at least so many times as many microbatches as there are ranks. per_rank:
    what each rank on the way to the last adds to the warm-up."""

    def build(wanted: ScheduleShape) -> Schedule:
        groups = groups_of(wanted.microbatches, groups_in_turn * wanted.ranks, wanted.group)
        first = (wanted.virtual_stages - 1) * (wanted.group or groups[0])
        last = wanted.ranks - 1
        return _schedule(name, wanted, groups, lambda rank: first + per_rank * (last - rank))

    return build


def _breadth_first(wanted: ScheduleShape) -> Schedule:
    """All microbatches are one group, and all forwards are before the backwards."""
    everything = wanted.microbatches * wanted.virtual_stages
    return _schedule("looped-bfs", wanted, [wanted.microbatches], lambda rank: everything)


INTERLEAVED = (
    Family(
        "interleaved-1f1b",
        _interleaved("interleaved-1f1b", 1, 2),
        "1F1B over several stages a rank: a bubble as many times smaller, and more messages",
        "Megatron-LM, SC 2021, arXiv 2104.04473",
        groups=True,
    ),
    # With twice as many microbatches in a group, one that went round has half a group's time to arrive; with
    # a longer warm-up, a gradient has one more slot at every rank. Messages of up to two slots hide.
    Family(
        "eager-interleaved-1f1b",
        _interleaved("eager-interleaved-1f1b", 2, 3),
        "interleaved 1F1B with larger groups and a longer warm-up, so that messages hide; more memory",
        "eager warm-up of arXiv 2211.05322 on the order of arXiv 2104.04473",
        groups=True,
    ),
    Family(
        "looped-bfs",
        _breadth_first,
        "each stage of a rank takes all microbatches before its next one; every microbatch is live",
        "Breadth-First Pipeline Parallelism, MLSys 2023, arXiv 2211.05953",
        lambda wanted: wanted.microbatches,
    ),
)
"""In the order in which they are listed to users."""
