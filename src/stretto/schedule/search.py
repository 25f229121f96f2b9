"""The fastest order of actions that is found for given times and memory: `auto`.

1. Every family that can have so many stages a rank, with as many live microbatches as memory allows.
2. List scheduling (`stretto.schedule.list_schedule`) with the backward split, by the order of each family,
   input gradients first, and the zero-bubble warm-up; compared over few microbatches, the best over all.
3. All that was found, the fastest first, with a bound: no family is faster than the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.schedule.list_schedule import ActionWalk, Room, Urgency, places_in
from stretto.schedule.timing import PhaseTimes, hops_of, peak_live, time_schedule

ENOUGH = 8
"""Microbatches for every rank over which orders are compared first. With 4, orders of 32 ranks and 256
microbatches that are best over 128 were kept, and the one that reaches ZB-2p was not."""

KEPT = 4
"""Orders of lists that are compared over all microbatches. Assumed."""

GIVEN_UP = ((0.0, False), (0.25, False), (0.5, False), (0.0, True))
"""(part of a forward that is given up, whether the last input gradient is spared) of the zero-bubble warm-up.
Assumed; chosen on the table of arXiv 2401.10241."""

MEMORIES = (1, 2)
"""Times the memory of 1F1B, in which lists are made where nothing limits it: more is hardly faster (ZB-2p of
arXiv 2401.10241), and without a limit a list would run all forwards first."""


@dataclass(frozen=True, slots=True)
class Sought:
    """What an order is sought for.

    times: of phases and messages. room: memory of each rank, by the rank of each stage; None is no limit.
    max_live: the most live microbatches of a stage. group: of interleaved families. from_own_begin: whether a
    step counts from each rank's own begin, as where steps follow each other without a barrier; else from the
    first to the last action anywhere. joined: ways to make overlapped slots of an order, where they can; an
    order is as fast as the fastest of them and itself.
    """

    ranks: int
    virtual_stages: int
    microbatches: int
    times: PhaseTimes
    room: Callable[[tuple[int, ...]], Room] | None = None
    max_live: int | None = None
    group: int | None = None
    from_own_begin: bool = False
    joined: tuple[Callable[[Schedule], Schedule | None], ...] = ()

    def room_of(self, stage_ranks: tuple[int, ...]) -> Room | None:
        return None if self.room is None else self.room(stage_ranks)

    def time(self, schedule: Schedule) -> float:
        """What is to be small."""
        timings = [time_schedule(schedule, self.times)]
        for join in self.joined:
            joined = join(schedule)
            if joined is not None:
                # Of windows, not all of a slot need wait for what a part of it waits for.
                with suppress(PlanError):
                    timings.append(time_schedule(joined, self.times))
        return min(timing.cost if self.from_own_begin else timing.makespan for timing in timings)

    def fits(self, schedule: Schedule) -> bool:
        room = self.room_of(schedule.stage_ranks)
        if self.max_live is not None and max(peak_live(schedule)) > self.max_live:
            return False
        return room is None or room.has(schedule)

    def least(self, stage_ranks: tuple[int, ...]) -> float:
        """No order with this map takes less.

        A rank begins when the first of its stages can, and works for all microbatches. A microbatch goes
        through all stages and back. It takes memory of a rank from the begin of its F to the end of I, and
        some until the end of W; what all take for their time fits under the rank's limit.
        """
        stages, m, room = len(stage_ranks), self.microbatches, self.room_of(stage_ranks)
        share = min(1.0, self.times.overlapped)
        forward, into, weight = (
            [share * self.times.of(Action(stage, phase, 0)) for stage in range(stages)]
            for phase in (Phase.F, Phase.I, Phase.W)
        )
        hops = hops_of(stage_ranks, self.times)
        # When each stage can begin.
        heads = [*accumulate((f + hop for f, hop in zip(forward, hops, strict=False)), initial=0.0)]
        # From the begin of a stage's F to the end of its I.
        alive = [
            math.fsum(forward[stage:]) + math.fsum(into[stage:]) + 2 * math.fsum(hops[stage:])
            for stage in range(stages)
        ]
        result = [alive[0] + weight[0]]
        for rank in sorted(set(stage_ranks)):
            mine = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
            begin = 0.0 if self.from_own_begin else min(heads[stage] for stage in mine)
            result.append(begin + m * math.fsum(forward[s] + into[s] + weight[s] for s in mine))
            if self.max_live is not None:
                result += [begin + m * (alive[s] + weight[s]) / self.max_live for s in mine]
            if room is not None and room.limits[rank] > 0:
                has = math.fsum(room.full[s] * alive[s] + room.for_weight[s] * weight[s] for s in mine)
                result.append(begin + m * has / room.limits[rank])
        return max(result)


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """One order. time: what it takes, in the unit of the times. family: whether a family made it."""

    schedule: Schedule
    time: float
    family: bool = False


@dataclass(frozen=True, slots=True)
class Searched:
    """All orders that were found, the fastest first. bound: no order with any of their maps takes less."""

    found: tuple[TimedOrder, ...]
    bound: float

    @property
    def best(self) -> TimedOrder:
        return self.found[0]

    @property
    def gap(self) -> float:
        """How far the best is from the bound: 0.05 is five percent above it."""
        return max(0.0, self.best.time / self.bound - 1.0) if self.bound else 0.0


def search(sought: Sought) -> Searched:
    """Steps 1 to 3. Raises UsageError where no family fits the memory, and for times of other stages."""
    sought.times.check_stages(sought.ranks * sought.virtual_stages)
    families = [*_families(sought)]
    if not families:
        raise UsageError(
            f"no schedule of {sought.ranks} ranks and {sought.virtual_stages} stages each fits the memory: "
            "allow more, or give smaller microbatches"
        )
    result = [TimedOrder(schedule, sought.time(schedule), True) for schedule in families]
    result += _lists(sought, families)
    bound = min(sought.least(places) for places in {one.schedule.stage_ranks for one in result})
    # Of equal ones a family comes first: its order is known, and its backward may be full.
    result.sort(key=lambda one: (one.time, not one.family))
    return Searched(tuple(result), bound)


def _families(sought: Sought) -> Iterator[Schedule]:
    """Step 1."""
    for family in FAMILIES.values():
        if family.places.allow(sought.virtual_stages):
            made = _fitting(sought, family.name, family.groups)
            if made is not None:
                yield made


def _fitting(sought: Sought, family: str, groups: bool) -> Schedule | None:
    """The family with as many live microbatches as fit; None where none do."""

    def made(max_live: int | None) -> Schedule:
        return make_schedule(
            family,
            sought.ranks,
            sought.microbatches,
            virtual_stages=sought.virtual_stages,
            max_live=max_live,
            group=sought.group if groups else None,
        )

    try:
        free = made(sought.max_live)
        if sought.fits(free):
            return free
        fewest, most = 0, max(peak_live(free))
        best = None
        while most - fewest > 1:
            middle = (fewest + most) // 2
            one = made(middle)
            if sought.fits(one):
                best, fewest = one, middle
            else:
                most = middle
    except UsageError:  # a limit, or a group, that the family cannot have
        return None
    return best


@dataclass(frozen=True, slots=True)
class _ListWay:
    """A way to make an order for so many microbatches. memory: times that of 1F1B, instead of the room's."""

    stage_ranks: tuple[int, ...]
    name: str
    urgency: Callable[[Sought], Urgency]
    memory: int | None = None
    in_turn: bool = False
    spare_last: bool = False

    def made(self, sought: Sought) -> Schedule | None:
        """None where the walk stops half way."""
        orders = ActionWalk(
            self.stage_ranks,
            sought.microbatches,
            self.urgency(sought),
            stage_limit=sought.max_live,
            room=_room(sought, self.stage_ranks, self.memory),
            in_turn=self.in_turn,
            spare_last=self.spare_last,
            times=sought.times,
        ).orders()
        if orders is None:
            return None
        return Schedule(self.name, len(self.stage_ranks), sought.microbatches, self.stage_ranks, orders)


def _lists(sought: Sought, families: Sequence[Schedule]) -> list[TimedOrder]:
    """Step 2."""
    short = replace(sought, microbatches=min(sought.microbatches, ENOUGH * sought.ranks))
    tried = [(way.made(short), way) for way in _ways(sought, families)]
    timed = [(short.time(made), way) for made, way in tried if made is not None]
    timed.sort(key=lambda one: one[0])
    orders = [way.made(sought) for _, way in timed[:KEPT]]
    return [TimedOrder(one, sought.time(one)) for one in orders if one is not None and sought.fits(one)]


def _ways(sought: Sought, families: Sequence[Schedule]) -> Iterator[_ListWay]:
    memories = MEMORIES if sought.room is None else (None,)
    for family in families:
        yield _ListWay(family.stage_ranks, f"{family.family} by list", _order_of(family), memories[-1])
    for stage_ranks in dict.fromkeys(family.stage_ranks for family in families):
        for memory in memories:
            yield _ListWay(stage_ranks, "backward first", backward_first, memory)
            for given_up, spare_last in GIVEN_UP if sought.virtual_stages == 1 else ():
                urgency = partial(warm_up_first, memory=memory, given_up=given_up)
                yield _ListWay(stage_ranks, "zero bubble", urgency, memory, True, spare_last)


def _order_of(family: Schedule) -> Callable[[Sought], Urgency]:
    """A family's own order as urgencies; of a full backward, W comes after I."""
    place = places_in(family)

    def urgency(action: Action) -> float:
        at = place.get(action)
        if at is not None:
            return at
        return place[replace(action, phase=Phase.B)] + (0.5 if action.phase is Phase.W else 0.0)

    return lambda sought: urgency


def _room(sought: Sought, stage_ranks: tuple[int, ...], memory: int | None) -> Room | None:
    if memory is None:
        return sought.room_of(stage_ranks)
    return Room.even(sought.ranks, len(stage_ranks), memory * sought.ranks)


ROUNDING = 1e-9
"""Part of a forward by which two times that are equal may differ."""


def backward_first(sought: Sought) -> Urgency:
    """Input gradients, then forwards, each with the oldest microbatch and the last stage first."""
    stages = sought.ranks * sought.virtual_stages

    def urgency(action: Action) -> float:
        later = sought.microbatches if action.phase is Phase.F else 0
        return (later + action.microbatch) * stages + stages - 1 - action.stage

    return urgency


def warm_up_first(sought: Sought, *, memory: int | None, given_up: float) -> Urgency:
    """With one stage a rank, in turn (arXiv 2401.10241, section 3): as many forwards as end before the first
    input gradient can arrive, and as memory allows; then an input gradient and a forward in turn.

    memory: as in `_ListWay`. given_up: a part of a forward, on all ranks but the first, as a forward that has
    begun delays an input gradient that arrives. Warm-ups never grow from rank to rank, so that the order
    cannot deadlock.
    """
    ranks, microbatches, times = sought.ranks, sought.microbatches, sought.times
    room = _room(sought, tuple(range(ranks)), memory)
    live: float = microbatches
    if room is not None:
        live = min(a / b if b else live for a, b in zip(room.limits, room.full, strict=True))
    forward, backward = (
        [times.of(Action(rank, phase, 0)) for rank in range(ranks)] for phase in (Phase.F, Phase.I)
    )
    hops = hops_of(range(ranks), times)
    place: dict[Action, int] = {}
    for rank in range(ranks):
        until = sum(forward[rank:]) + sum(backward[rank + 1 :]) + 2 * sum(hops[rank:])
        fits = until / forward[rank] if forward[rank] > 0 else math.inf
        live = warm_up = max(1, math.floor(min(fits - (given_up if rank else 0.0) + ROUNDING, live)))
        first = min(warm_up, microbatches)
        order = [Action(rank, Phase.F, k) for k in range(first)]
        for k in range(microbatches):
            order.append(Action(rank, Phase.I, k))
            if first + k < microbatches:
                order.append(Action(rank, Phase.F, first + k))
        place.update((action, at) for at, action in enumerate(order))
    return lambda action: place.get(action, action.microbatch)
