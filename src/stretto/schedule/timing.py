"""The timing of a schedule: when each action starts and ends if a phase takes a given time.

The coarse clock for families: actions in order on every rank, messages between ranks that delay the receiver
and occupy no one. Ops, lanes and links are for `stretto.simulate`. Units are the caller's: all results are in
the unit of the times put in.

Rules:

1. A rank runs its slots in order. F of a stage waits for F of the stage before; I and B wait for the own F
   and for I or B of the stage after; W waits for the own I.
2. A result of another rank arrives `message` after its action's end; a result of the own rank at its end.
   Where messages are `blocking`, they leave when the receiver is free and it computes nothing until they are
   there, one after the other.
3. Overlapped actions are one block: it starts when all of them can, lasts as long as all of them together or
   a share of that, and every one of them ends with the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action, Phase, Schedule, Slot

PerStageTime = float | tuple[float, ...]
"""One time for all stages, or one for each."""

_FIELDS = {"F": "forward", "I": "input_gradient", "W": "weight_gradient", "message": "message"}


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """How long phases and messages take, in any one unit. B takes I and W together.

    A phase has one time for all stages, or a tuple with one for each stage. `message` is the latency between
    two different ranks, one for all or one for each border (the first is that of stages 0 and 1); `blocking`
    says that the receiver waits meanwhile (rule 2). `overlapped` is the share of their times one after the
    other that overlapped actions take. Raises UsageError for a time that is negative or not finite.
    """

    forward: PerStageTime
    input_gradient: PerStageTime
    weight_gradient: PerStageTime
    message: PerStageTime = 0.0
    blocking: bool = False
    overlapped: float = 1.0

    def __post_init__(self) -> None:
        for key, name in _FIELDS.items():
            value: PerStageTime = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if not (math.isfinite(one) and one >= 0):
                    raise UsageError(f"time {key}={one} is not a time: give a finite number, 0 or more")

    def of(self, action: Action) -> float:
        """The action's duration."""
        phases = action.phase.programs
        values: list[PerStageTime] = [getattr(self, _FIELDS[phase.value]) for phase in phases]
        return sum(one[action.stage] if isinstance(one, tuple) else one for one in values)

    def hop(self, border: int) -> float:
        """What a message takes over a border between stages that are on different ranks."""
        return self.message[border] if isinstance(self.message, tuple) else self.message

    def check_stages(self, stages: int) -> None:
        """Raise UsageError if a phase has a time for each stage but not one for each of `stages`; or message
        one for each border, but not for all between `stages`."""
        if isinstance(self.message, tuple) and len(self.message) != stages - 1:
            raise UsageError(
                f"message has times for {len(self.message)} borders, but {stages} stages have {stages - 1}"
            )
        for key in ("F", "I", "W"):
            value: PerStageTime = getattr(self, _FIELDS[key])
            if isinstance(value, tuple) and len(value) != stages:
                raise UsageError(f"{key} has times for {len(value)} stages, but the schedule has {stages}")


def hops_of(stage_ranks: Sequence[int], times: PhaseTimes) -> tuple[float, ...]:
    """What a message takes over each border; nothing within a rank."""
    return tuple(0.0 if a == b else times.hop(border) for border, (a, b) in enumerate(pairwise(stage_ranks)))


UNIT_TIMES = PhaseTimes(1.0, 1.0, 1.0)
"""Equal phases and free messages: the times with which schedules are usually drawn."""


def parse_times(text: str) -> PhaseTimes:
    """Read `F=18.5,I=18.1,W=9.3,message=0.6`; a phase may have a time for each stage: `F=10:12:12:14`.

    F, I and W must be given; message is 0 unless given. Raises UsageError that quotes the part at fault.
    """
    result: dict[str, PerStageTime] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key == "B":
            raise UsageError("times: B is I and W together; give I=... and W=...")
        if not equals or key not in _FIELDS:
            raise UsageError(f"times: cannot read {part.strip()!r}; write F=...,I=...,W=...,message=...")
        if key in result:
            raise UsageError(f"times: {key} is given twice")
        try:
            numbers = tuple(float(one) for one in value.split(":"))
        except ValueError:
            raise UsageError(
                f"times: {part.strip()!r} has no number; write for example {key}=1.5"
                + f" or, for each {'border' if key == 'message' else 'stage'}, {key}=1.5:2:2"
            ) from None
        result[key] = numbers[0] if len(numbers) == 1 else numbers
    missing = [key for key in ("F", "I", "W") if key not in result]
    if missing:
        raise UsageError(f"times: {', '.join(missing)} missing; write F=...,I=...,W=...,message=...")
    return PhaseTimes(result["F"], result["I"], result["W"], result.get("message", 0.0))


@dataclass(frozen=True, slots=True)
class ScheduleTiming:
    """When everything happens. All times are in the unit of `times` and count from the step's start.

    `cost` is the longest rank's time from its first start to its last end: what a step costs when steps
    follow each other without a barrier. `bubble_rate` is the mean share of `cost` in which a rank computes
    nothing; with equal stages it is (cost - m(F+I+W)) / cost, as in the zero-bubble paper (arXiv 2401.10241).
    `peak_live[stage]` is the largest number of microbatches whose forward ran and whose last backward action
    (W where it is split, else B) did not.
    """

    times: PhaseTimes
    start: dict[Action, float] = field(repr=False)
    end: dict[Action, float] = field(repr=False)
    makespan: float
    cost: float
    bubble_rate: float
    peak_live: tuple[int, ...]


def time_schedule(schedule: Schedule, times: PhaseTimes = UNIT_TIMES) -> ScheduleTiming:
    """Time every action of the schedule.

    Raises PlanError for a schedule that cannot progress, naming each stuck rank, its action and what it waits
    for; for an action that is there twice and for a stage that does not exist. Raises UsageError if the times
    are for another number of stages.
    """
    times.check_stages(schedule.stages)
    rank_of = _ranks_of_actions(schedule)
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free_at = [0.0] * schedule.ranks
    next_slot = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = {}  # what is missing -> the ranks that stopped for it
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        order = schedule.orders[rank]
        while next_slot[rank] < len(order):
            slot = order[next_slot[rank]]
            begin = free_at[rank]
            missing = None
            received_in = 0.0
            for needed in _needs(slot, schedule.stages, rank_of):
                if needed not in end:
                    missing = needed
                    break
                # Over the border to the stage that needs it: forward, or back.
                border = needed.stage if needed.phase is Phase.F else needed.stage - 1
                latency = 0.0 if rank_of[needed] == rank else times.hop(border)
                if times.blocking:
                    received_in += latency
                    latency = 0.0
                begin = max(begin, end[needed] + latency)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            begin += received_in
            free_at[rank] = begin + _takes(slot, times)
            for action in slot.actions:
                start[action], end[action] = begin, free_at[rank]
                runnable += waiting.pop(action, ())
            next_slot[rank] += 1
    if waiting:
        raise PlanError(
            f"schedule {schedule.family!r} cannot progress", _stuck(schedule, waiting, next_slot, rank_of)
        )

    spans, busy = [], []
    for rank in range(schedule.ranks):
        actions = list(schedule.actions(rank))
        spans.append(free_at[rank] - start[actions[0]] if actions else 0.0)
        busy.append(math.fsum(_takes(slot, times) for slot in schedule.orders[rank]))
    cost = max(spans, default=0.0)
    bubble_rate = (cost - math.fsum(busy) / len(busy)) / cost if cost > 0 else 0.0
    return ScheduleTiming(
        times, start, end, max(free_at, default=0.0), cost, max(bubble_rate, 0.0), peak_live(schedule)
    )


def _takes(slot: Slot, times: PhaseTimes) -> float:
    """Rule 3."""
    takes = sum(times.of(action) for action in slot.actions)
    return takes * times.overlapped if len(slot.actions) > 1 else takes


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of live microbatches of each stage; it follows from the order alone."""
    stages = range(schedule.stages)
    return tuple(map(int, most_kept(schedule, stages, (1,) * len(stages), (1,) * len(stages))))


def most_kept(
    schedule: Schedule, places: Sequence[int], full: Sequence[float], for_weight: Sequence[float]
) -> tuple[float, ...]:
    """By place, the most that its microbatches keep. places: the place for which each stage counts; full,
    for_weight: by stage, what a microbatch keeps from its forward to the end of I (or B), and from there to
    the end of W.

    Within overlapped actions the forwards count first, as nothing of the backward need be done before them.
    """
    kept, most = [0.0] * (max(places) + 1), [0.0] * (max(places) + 1)
    for order in schedule.orders:
        for slot in order:
            for action in sorted(slot.actions, key=lambda one: one.phase is not Phase.F):
                place, all_of_it, rest = places[action.stage], full[action.stage], for_weight[action.stage]
                change = {Phase.F: all_of_it, Phase.B: -all_of_it, Phase.I: rest - all_of_it, Phase.W: -rest}
                kept[place] += change[action.phase]
                most[place] = max(most[place], kept[place])
    return tuple(most)


def _ranks_of_actions(schedule: Schedule) -> dict[Action, int]:
    rank_of: dict[Action, int] = {}
    faults = []
    for rank in range(schedule.ranks):
        for action in schedule.actions(rank):
            if not 0 <= action.stage < schedule.stages:
                faults.append(
                    f"rank {rank}: {action} is for a stage that does not exist ({schedule.stages} stages)"
                )
            elif action in rank_of:
                faults.append(f"rank {rank}: {action} is there again; each action runs once")
            rank_of.setdefault(action, rank)
    if faults:
        raise PlanError(f"schedule {schedule.family!r} cannot be timed", faults)
    return rank_of


def _needs(slot: Slot, stages: int, rank_of: dict[Action, int]) -> list[Action]:
    """The actions whose results the slot needs, rule 1."""
    needs = []
    for action in slot.actions:
        stage, k = action.stage, action.microbatch
        if action.phase is Phase.F:
            if stage > 0:
                needs.append(Action(stage - 1, Phase.F, k))
        elif action.phase is Phase.W:
            needs.append(Action(stage, Phase.I, k))
        else:
            needs.append(Action(stage, Phase.F, k))
            if stage + 1 < stages:
                full, split = (Action(stage + 1, phase, k) for phase in (Phase.B, Phase.I))
                needs.append(split if split in rank_of else full)
    return needs


def _stuck(
    schedule: Schedule, waiting: dict[Action, list[int]], next_slot: list[int], rank_of: dict[Action, int]
) -> list[str]:
    faults = []
    for missing, ranks in waiting.items():
        for rank in ranks:
            slot = schedule.orders[rank][next_slot[rank]]
            known = missing in rank_of
            where = f"which rank {rank_of[missing]} has not reached" if known else "which no rank runs"
            faults.append((rank, f"rank {rank}: {slot} waits for {missing}, {where}"))
    return [text for _, text in sorted(faults)]
