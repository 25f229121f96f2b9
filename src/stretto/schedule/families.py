"""The schedule families: functions from (stages, microbatches, memory limit) to an order of actions a rank.

A family knows nothing of times, ops or devices; it may touch `stretto.ir` only. On every rank the forwards,
the input gradients and the weight gradients each go through the microbatches in ascending order, so that
gradients are summed in one order whatever the family.

Terms: a stage's *warm-up* is the number of forwards before its first backward; its *delay* is how many
microbatches its weight gradients lag behind its input gradients; a microbatch is *live* on a stage from the
end of its forward to the end of its last backward action (W where the backward is split, else B).

All families but GPipe are one pattern with two numbers a stage:

1. run `warm-up` forwards;
2. for every microbatch k: the backward of k; the weight gradient of k - delay; the next forward;
3. run the weight gradients that are left.

At most warm-up + delay microbatches are live in it. The pattern cannot deadlock as long as the warm-up does
not grow from one stage to the next: the last forward of a stage's warm-up then never waits for a backward
that itself waits for this stage. A memory limit cuts the warm-up first to the limit, and the delay to what is
left, which keeps that property.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stretto.errors import UsageError
from stretto.ir.action import Action, Phase, Schedule

PerStage = Callable[[int, int], int]
"""(number of stages, stage) -> a number of microbatches."""


@dataclass(frozen=True, slots=True)
class Family:
    """A named way to order actions.

    `build(stages, microbatches, max_live)` makes the schedule (call `make_schedule`, which checks the
    arguments); `min_live(stages, microbatches)` is the smallest memory limit that the family can keep.
    """

    name: str
    build: Callable[[int, int, int | None], Schedule]
    description: str
    source: str
    min_live: Callable[[int, int], int]


def make_schedule(family: str, stages: int, microbatches: int, *, max_live: int | None = None) -> Schedule:
    """Make a family's schedule with one stage a rank (stage i on rank i).

    `max_live` is the largest number of live microbatches a stage may hold, in microbatches; None leaves the
    family its own number. Raises UsageError for an unknown family, for a number below 1, and for a limit that
    the family cannot keep; the message names the smallest that it can.
    """
    if family not in FAMILIES:
        raise UsageError(f"unknown schedule family {family!r}; choose one of: {', '.join(FAMILIES)}")
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise UsageError(f"{name} is {value}; a schedule needs at least 1")
    found = FAMILIES[family]
    if max_live is not None:
        least = found.min_live(stages, microbatches)
        if max_live < least:
            raise UsageError(
                f"family {family!r} cannot keep max_live={max_live} with {stages} stages and "
                f"{microbatches} microbatches: its minimum is {least}. Raise max_live"
                + (
                    " or choose a family that alternates forward and backward, such as 1f1b"
                    if least > 1
                    else ""
                )
            )
    return found.build(stages, microbatches, max_live)


def gpipe(stages: int, microbatches: int, max_live: int | None = None) -> Schedule:
    """All forwards, then all backwards, in microbatch order.

    Every stage holds all microbatches, so `max_live` cannot lower it (`make_schedule` refuses less).
    Source: GPipe (Huang et al., NeurIPS 2019, arXiv 1811.06965).
    """
    del max_live
    orders = tuple(
        tuple(Action(stage, phase, k) for phase in (Phase.F, Phase.B) for k in range(microbatches))
        for stage in range(stages)
    )
    return Schedule("gpipe", stages, microbatches, tuple(range(stages)), orders)


def one_f_one_b(stages: int, microbatches: int, max_live: int | None = None) -> Schedule:
    """Stage i of n runs n - i forwards, then one backward and one forward in turn.

    Live: min(m, n - i). Source: PipeDream-Flush (Narayanan et al., ICML 2021, arXiv 2006.09503).
    """
    return _alternate("1f1b", stages, microbatches, max_live, _one_each_to_the_end)


def eager_one_f_one_b(stages: int, microbatches: int, max_live: int | None = None) -> Schedule:
    """1F1B with a longer warm-up, 2(n - i) - 1 forwards, so that each message has a slot's time to travel.

    Live: min(m, 2(n - i) - 1). Source: Alpa pull request #773 (overlapped cross-mesh resharding); the idea
    is in arXiv 2211.05322.
    """
    return _alternate("eager-1f1b", stages, microbatches, max_live, _a_round_trip)


def zb_h1(stages: int, microbatches: int, max_live: int | None = None) -> Schedule:
    """1F1B's warm-up with the backward split; stage i lets its weight gradients lag by i microbatches.

    The lag fills what 1F1B leaves empty on the late stages and makes every stage as full as 1F1B's first:
    live is min(m, n) everywhere. The bubble shrinks from (n-1)(F+I+W) to (n-1)(F+I-W) without message time.
    Source: Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024, arXiv 2401.10241), schedule ZB-H1.
    """
    return _alternate("zb-h1", stages, microbatches, max_live, _one_each_to_the_end, lambda n, i: i)


def zb_h2(stages: int, microbatches: int, max_live: int | None = None) -> Schedule:
    """A warm-up of 2(n - i) - 1 forwards and a lag of 2i: once started, a stage need not be idle.

    Live is min(m, 2n - 1) everywhere, about twice 1F1B's most. Without message time and with m of at least
    2n - 1 the bubble is (n-1)(F+I-2W): nothing when the phases are equal. Source: as ZB-H1, schedule ZB-H2.
    """
    return _alternate("zb-h2", stages, microbatches, max_live, _a_round_trip, lambda n, i: 2 * i)


def _one_each_to_the_end(stages: int, stage: int) -> int:
    """Forwards that fill the way from this stage to the last one."""
    return stages - stage


def _a_round_trip(stages: int, stage: int) -> int:
    """Forwards that fill the way to the last stage and back, with one time slot for each stage on the way."""
    return 2 * (stages - stage) - 1


def _alternate(
    family: str,
    stages: int,
    microbatches: int,
    max_live: int | None,
    warm_up_of: PerStage,
    delay_of: PerStage | None = None,
) -> Schedule:
    """The pattern of the module's docstring; without `delay_of` the backward is one B action."""
    limit = microbatches if max_live is None else min(max_live, microbatches)
    orders = []
    for stage in range(stages):
        warm_up = min(limit, warm_up_of(stages, stage))
        delay = None if delay_of is None else min(limit - warm_up, delay_of(stages, stage))
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
    return Schedule(family, stages, microbatches, tuple(range(stages)), tuple(orders))


def _at_least_one(stages: int, microbatches: int) -> int:
    return 1


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "gpipe",
            gpipe,
            "all forwards, then all backwards; every microbatch is live",
            "GPipe, NeurIPS 2019, arXiv 1811.06965",
            lambda stages, microbatches: microbatches,
        ),
        Family(
            "1f1b",
            one_f_one_b,
            "one forward, one backward in turn; least memory",
            "PipeDream-Flush, ICML 2021, arXiv 2006.09503",
            _at_least_one,
        ),
        Family(
            "eager-1f1b",
            eager_one_f_one_b,
            "1F1B with forwards sent early, so that messages hide; up to twice the memory",
            "Alpa pull request #773; arXiv 2211.05322",
            _at_least_one,
        ),
        Family(
            "zb-h1",
            zb_h1,
            "backward split in I and W, W fills the bubble; 1F1B's memory",
            "Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
            _at_least_one,
        ),
        Family(
            "zb-h2",
            zb_h2,
            "backward split, longer warm-up; no bubble when F, I and W are equal; about twice the memory",
            "Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv 2401.10241",
            _at_least_one,
        ),
    )
}
"""Every family by its name; the order is the one in which they are listed to users."""
