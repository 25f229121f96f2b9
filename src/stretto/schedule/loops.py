"""Families whose stages go round the ranks in a loop: one stage a rank, or several.

One stage a rank: a stage's *warm-up* is the number of forwards before its first backward; its *delay* is how
many microbatches its weight gradients lag behind its input gradients.

1. run `warm-up` forwards;
2. for every microbatch k: the backward of k; the weight gradient of k - delay; the next forward;
3. run the weight gradients that are left.

At most warm-up + delay microbatches are live. The pattern cannot deadlock as long as the warm-up does not
grow from one stage to the next. A memory limit, or else the number of microbatches, cuts the warm-up first to
the limit, and the delay to what is left: this pattern has no order of all F, all I, all W.

Several stages a rank: stage s is on rank s modulo ranks.

1. The forwards of a rank go group by group of microbatches: the group's microbatches through the rank's
   first stage, then through its second, and so on. Its backwards do the same from its last stage to its
   first.
2. Interleaved 1F1B is 1F1B over these two lists. The warm-up is what the first group runs before its last
   stage, and on top a number for every rank on the way to the last one and back.
3. Unless the user names a group, microbatches are shared equally by as many groups as there are of at least
   `ranks` microbatches each, as in Megatron-LM and PyTorch. A group that the user names is Megatron-LM's
   `--microbatch-group-size-per-virtual-pipeline-stage`: the last one may be smaller, and then ranks may wait
   for each other forever (`make_schedule` refuses that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.ir.action import Action, Phase, Schedule
from stretto.ir.stage_maps import loop
from stretto.schedule.family import Family, ScheduleShape
from stretto.schedule.list_schedule import limited

PerStage = Callable[[int, int, int], int]
"""(stages, stage, microbatches) -> a number of microbatches."""


def _one_each_to_the_end(stages: int, stage: int, microbatches: int) -> int:
    """Forwards that fill the way from this stage to the last one."""
    return stages - stage


def _a_round_trip(stages: int, stage: int, microbatches: int) -> int:
    """Forwards that fill the way to the last stage and back, with one time slot for each stage on the way."""
    return 2 * (stages - stage) - 1


def _pattern(warm_up_of: PerStage, delay_of: PerStage | None = None) -> Callable[[ScheduleShape], Schedule]:
    """The pattern of the module's docstring."""

    def build(wanted: ScheduleShape) -> Schedule:
        stages, microbatches = wanted.stages, wanted.microbatches
        limit = microbatches if wanted.max_live is None else min(wanted.max_live, microbatches)
        orders = []
        for stage in range(stages):
            warm_up = min(limit, warm_up_of(stages, stage, microbatches))
            delay = None if delay_of is None else min(limit - warm_up, delay_of(stages, stage, microbatches))
            order = [Action(stage, Phase.F, k) for k in range(warm_up)]
            for k in range(microbatches):
                order.append(Action(stage, Phase.B if delay is None else Phase.I, k))
                if delay is not None and k >= delay:
                    order.append(Action(stage, Phase.W, k - delay))
                if warm_up + k < microbatches:
                    order.append(Action(stage, Phase.F, warm_up + k))
            if delay is not None:
                order += [Action(stage, Phase.W, k) for k in range(microbatches - delay, microbatches)]
            orders.append(tuple(order))
        return Schedule("", stages, microbatches, tuple(range(stages)), tuple(orders))

    return build


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
    made = Schedule("", wanted.stages, wanted.microbatches, loop(ranks, each), tuple(orders))
    return limited(made, wanted.max_live)


def _interleaved(groups_in_turn: int, per_rank: int) -> Callable[[ScheduleShape], Schedule]:
    """groups_in_turn: a group has at least so many times as many microbatches as there are ranks. per_rank:
    what each rank on the way to the last adds to the warm-up."""

    def build(wanted: ScheduleShape) -> Schedule:
        groups = groups_of(wanted.microbatches, groups_in_turn * wanted.ranks, wanted.group)
        first = (wanted.virtual_stages - 1) * (wanted.group or groups[0])
        last = wanted.ranks - 1
        return _schedule(wanted, groups, lambda rank: first + per_rank * (last - rank))

    return build


def _breadth_first(wanted: ScheduleShape) -> Schedule:
    """All microbatches are one group, and all forwards are before the backwards."""
    everything = wanted.microbatches * wanted.virtual_stages
    return _schedule(wanted, [wanted.microbatches], lambda rank: everything)


LOOPS = (
    Family(
        "gpipe",
        _pattern(lambda n, i, m: m),
        "all forwards, then all backwards; every microbatch is live",
        "GPipe, NeurIPS 2019, arXiv 1811.06965",
        keeps_any_limit=False,
        eager="eager-1f1b",
    ),
    # Live: min(m, n - i) on stage i of n.
    Family(
        "1f1b",
        _pattern(_one_each_to_the_end),
        "one forward, one backward in turn; least memory",
        "PipeDream-Flush, ICML 2021, arXiv 2006.09503",
        eager="eager-1f1b",
    ),
    # Each message has a slot's time to travel. Live: min(m, 2(n - i) - 1).
    Family(
        "eager-1f1b",
        _pattern(_a_round_trip),
        "1F1B with forwards sent early, so that messages hide; up to twice the memory",
        "Alpa pull request #773; arXiv 2211.05322",
    ),
    # Live: as in eager-1f1b.
    Family(
        "eager-1f1b-split",
        _pattern(_a_round_trip, lambda n, i, m: 0),
        "eager-1f1b, backward split in I and W, W right after its I; the same memory",
        "weight delay of Alpa pull request #773; arXiv 2211.05322",
    ),
    # Fills what 1F1B leaves empty on the late stages and makes every stage as full as 1F1B's first: live
    # is min(m, n) everywhere. Without message time the bubble shrinks from (n-1)(F+I+W) to (n-1)(F+I-W).
    Family(
        "zb-h1",
        _pattern(_one_each_to_the_end, lambda n, i, m: i),
        "backward split in I and W, W fills the bubble; 1F1B's memory",
        "Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
    ),
    # Once started, a stage need not be idle. Live is min(m, 2n - 1) everywhere. Without message time and
    # with m of at least 2n - 1 the bubble is (n-1)(F+I-2W): nothing when the phases are equal.
    Family(
        "zb-h2",
        _pattern(_a_round_trip, lambda n, i, m: 2 * i),
        "backward split, longer warm-up; no bubble when F, I and W are equal; about twice the memory",
        "Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
    ),
    Family(
        "interleaved-1f1b",
        _interleaved(1, 2),
        "1F1B over several stages a rank: a bubble as many times smaller, and more messages",
        "Megatron-LM, SC 2021, arXiv 2104.04473",
        groups=True,
        eager="eager-interleaved-1f1b",
    ),
    # With twice as many microbatches in a group, one that went round has half a group's time to arrive; with
    # a longer warm-up, a gradient has one more slot at every rank. Messages of up to two slots hide.
    Family(
        "eager-interleaved-1f1b",
        _interleaved(2, 3),
        "interleaved 1F1B with larger groups and a longer warm-up, so that messages hide; more memory",
        "eager warm-up of arXiv 2211.05322 on the order of arXiv 2104.04473",
        groups=True,
    ),
    Family(
        "looped-bfs",
        _breadth_first,
        "each stage of a rank takes all microbatches before its next one; every microbatch is live",
        "Breadth-First Pipeline Parallelism, MLSys 2023, arXiv 2211.05953",
        keeps_any_limit=False,
    ),
)
