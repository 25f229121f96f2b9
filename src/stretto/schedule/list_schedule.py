"""Orders from a walk in time: each rank takes the most urgent action that is ready and fits its memory.

The one list scheduler of actions; families with a memory limit, and the search for an order, differ in
urgencies alone. Each time that a rank is free:

1. Of each of its stages, only the next microbatch of each phase is looked at.
2. An action is ready when all that it needs is done and, from another rank, has arrived. A forward must also
   fit the memory (`Room`).
3. Of what is ready the most urgent runs; a weight gradient where nothing else is ready or fits. `in_turn`,
   forwards and input gradients never overtake each other: where the most urgent of them is not ready, only a
   weight gradient may run.

A forward runs only where the oldest microbatch that has not been through all of the rank's stages still fits
beside what is then kept: so no limit of memory stops the walk, but in turn it may stop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.timing import UNIT_TIMES, PhaseTimes, hops_of, most_kept, peak_live

SLACK = 1e-9
"""Relative to a limit, what may exceed it: a few roundings of double precision."""


@dataclass(frozen=True, slots=True)
class Room:
    """limits: by rank, the most that microbatches may keep. full: by stage, what a microbatch keeps from its
    forward to the end of I (or B). for_weight: by stage, what it still keeps from there to the end of W."""

    limits: tuple[float, ...]
    full: tuple[float, ...]
    for_weight: tuple[float, ...]

    @staticmethod
    def even(ranks: int, stages: int, microbatches: float, weight_share: float = 1.0) -> Room:
        """Equal stages: a rank may keep so many microbatches on all its stages, of which those that wait for
        W alone count a share."""
        each = ranks / stages
        return Room((microbatches,) * ranks, (each,) * stages, (weight_share * each,) * stages)

    def has(self, schedule: Schedule) -> bool:
        """Whether no rank has more than it may."""
        most = most_kept(schedule, schedule.stage_ranks, self.full, self.for_weight)
        return all(kept <= limit * (1 + SLACK) for kept, limit in zip(most, self.limits, strict=True))


Urgency = Callable[[Action], float]
"""Smallest first; no two actions of a rank have the same."""


def limited(schedule: Schedule, max_live: int | None) -> Schedule:
    """The schedule with at most so many live microbatches a stage: itself where it has no more, else what a
    walk with its own order as urgency gives. It has F and B, or F, I and W, of every microbatch."""
    if max_live is None or max(peak_live(schedule)) <= max_live:
        return schedule
    place = places_in(schedule)
    split = any(action.phase is Phase.W for action in place)
    orders = ActionWalk(
        schedule.stage_ranks, schedule.microbatches, place.__getitem__, split, max_live
    ).orders()
    assert orders is not None, "a limit of live microbatches stops no walk"
    return replace(schedule, orders=orders)


def places_in(schedule: Schedule) -> dict[Action, int]:
    """The index of each action of a schedule in its rank's order."""
    return {action: at for rank in range(schedule.ranks) for at, action in enumerate(schedule.actions(rank))}


@dataclass
class ActionWalk:
    """Orders of actions by *queue*: one for each stage and phase, from which the next microbatch is taken.

    split: whether the backward is I and W, or B. stage_limit: the most live microbatches of a stage. room:
    memory of each rank's stages together. in_turn: see step 3. spare_last: whether W waits where it would
    delay a rank's last input gradient that another stage needs.
    """

    stage_ranks: Sequence[int]
    microbatches: int
    urgency: Urgency
    split: bool = True
    stage_limit: int | None = None
    room: Room | None = None
    in_turn: bool = False
    spare_last: bool = False
    times: PhaseTimes = UNIT_TIMES

    def __post_init__(self) -> None:
        stage_ranks, times, urgency = self.stage_ranks, self.times, self.urgency
        self.phases = (Phase.F, Phase.I, Phase.W) if self.split else (Phase.F, Phase.B)
        self.stages, self.ranks = len(stage_ranks), max(stage_ranks) + 1
        kinds = range(len(self.phases))
        every = [(stage, kind) for stage in range(self.stages) for kind in kinds]
        self.takes = [times.of(Action(stage, self.phases[kind], 0)) for stage, kind in every]
        self.hops = hops_of(stage_ranks, times)
        self.done = [0] * len(every)
        self.ends: list[list[float]] = [[] for _ in every]
        self.ready = [math.inf] * len(every)
        self.urgent = [urgency(Action(stage, self.phases[kind], 0)) for stage, kind in every]
        # W apart: it runs only where nothing else does.
        self.first_of: list[list[int]] = [[] for _ in range(self.ranks)]
        self.weights_of: list[list[int]] = [[] for _ in range(self.ranks)]
        for queue, (stage, kind) in enumerate(every):
            (self.weights_of if kind == 2 else self.first_of)[stage_ranks[stage]].append(queue)
        self.kept = [0.0] * self.ranks
        for stage in range(self.stages):
            self._look(stage * len(self.phases))

    def orders(self) -> tuple[tuple[Action, ...], ...] | None:
        """By rank; None where the walk stops half way."""
        count = len(self.phases)
        order: list[list[Action]] = [[] for _ in range(self.ranks)]
        free_at = [0.0] * self.ranks
        wakes = [(0.0, rank) for rank in range(self.ranks)]
        left = len(self.done) * self.microbatches
        while wakes:
            now, rank = heapq.heappop(wakes)
            queue = self._next(rank, now) if free_at[rank] <= now else None
            if queue is None:
                continue
            stage, kind = divmod(queue, count)
            end = now + self.takes[queue]
            order[rank].append(Action(stage, self.phases[kind], self.done[queue]))
            self._run(queue, stage, kind, end)
            left -= 1
            free_at[rank] = end
            heapq.heappush(wakes, (end, rank))
            target = stage + 1 if kind == 0 else stage - 1
            if kind < 2 and 0 <= target < self.stages and self.stage_ranks[target] != rank:
                heapq.heappush(wakes, (end + self.hops[min(stage, target)], self.stage_ranks[target]))
        return None if left else tuple(map(tuple, order))

    def _run(self, queue: int, stage: int, kind: int, end: float) -> None:
        """The queue's next action runs, and others may become ready by it."""
        count, rank = len(self.phases), self.stage_ranks[stage]
        self.done[queue] += 1
        self.ends[queue].append(end)
        if self.done[queue] < self.microbatches:
            self.urgent[queue] = self.urgency(Action(stage, self.phases[kind], self.done[queue]))
        if self.room is not None:
            full, rest = self.room.full[stage], self.room.for_weight[stage] if self.split else 0.0
            self.kept[rank] += (full, rest - full, -rest)[kind]
        self._look(queue)
        if kind < 2:
            if kind + 1 < count:
                self._look(queue + 1)
            target = stage + 1 if kind == 0 else stage - 1
            if 0 <= target < self.stages:
                self._look(target * count + kind)

    def _look(self, queue: int) -> None:
        """When the queue's next action is ready: infinite while something that it needs has not begun."""
        k, count = self.done[queue], len(self.phases)
        if k >= self.microbatches:
            self.ready[queue] = math.inf
            return
        stage, kind = divmod(queue, count)
        at = 0.0
        if kind:
            before = self.ends[queue - 1]
            at = before[k] if len(before) > k else math.inf
        source = stage + (-1, 1, self.stages)[kind]
        if 0 <= source < self.stages:
            others = self.ends[source * count + kind]
            at = max(at, others[k] + self.hops[min(stage, source)] if len(others) > k else math.inf)
        self.ready[queue] = at

    def _next(self, rank: int, now: float) -> int | None:
        """Steps 1 to 3."""
        coming = [queue for queue in self.first_of[rank] if self.done[queue] < self.microbatches]
        if self.in_turn and coming:
            coming = [min(coming, key=self.urgent.__getitem__)]
        best = None
        for queue in coming:
            if (
                self.ready[queue] <= now
                and (best is None or self.urgent[queue] < self.urgent[best])
                and self._fits(queue, rank)
            ):
                best = queue
        if best is not None:
            return best
        for queue in self.weights_of[rank]:
            if self.ready[queue] <= now and (best is None or self.urgent[queue] < self.urgent[best]):
                best = queue
        if best is not None and self.spare_last and self._holds_up(best, rank, now):
            return None
        return best

    def _holds_up(self, weight: int, rank: int, now: float) -> bool:
        """Whether the rank's last input gradient, on its way to another rank, would be delayed by W."""
        coming = [queue for queue in self.first_of[rank] if self.done[queue] < self.microbatches]
        if len(coming) != 1:
            return False
        last = coming[0]
        if last < len(self.phases) or self.done[last] + 1 < self.microbatches or self.ready[last] <= now:
            return False
        return self.ready[last] < now + self.takes[weight]

    def _fits(self, queue: int, rank: int) -> bool:
        """Whether a forward fits the memory."""
        count = len(self.phases)
        stage, kind = divmod(queue, count)
        if kind:
            return True
        live = self.done[queue] - self.done[queue + count - 1]
        if self.stage_limit is not None and live >= self.stage_limit:
            return False
        if self.room is None:
            return True
        limit = self.room.limits[rank] * (1 + SLACK)
        return self.kept[rank] + self.room.full[stage] <= limit and self._leaves_room(queue, rank) <= limit

    def _leaves_room(self, forward: int, rank: int) -> float:
        """With this forward, what the rank has of microbatches that its last stage has not had, when the
        oldest of them has been through all of the rank's stages."""
        assert self.room is not None
        count = len(self.phases)
        done = [self.done[at] + (at == forward) for at in self.first_of[rank] if at % count == 0]
        full = [self.room.full[at // count] for at in self.first_of[rank] if at % count == 0]
        return sum(kept * max(1, ahead - done[-1]) for kept, ahead in zip(full, done, strict=True))
