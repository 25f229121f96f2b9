"""Orders from a walk in time: each rank takes the most urgent action that is ready and fits its memory.

For families whose memory is limited: an order that is fixed beforehand would leave ranks idle. Each time that
a rank is free:

1. Of each of its stages, only the next microbatch of each phase is looked at, so that every phase goes
   through the microbatches in ascending order.
2. An action is ready when all that it needs is done and, from another rank, has arrived. A forward must also
   fit the limit of live microbatches.
3. Of what is ready the most urgent runs; a weight gradient where nothing else is ready or fits. `in_turn`,
   forwards and input gradients never overtake each other: where the most urgent of them is not ready, only a
   weight gradient may run.

Why a limit of live microbatches a stage never stops the walk: take the oldest microbatch that is not done.
All before it are done, so that no stage holds one of them, and it is let in everywhere. In turn, and with a
limit for a rank's stages together, the caller's urgencies have to be an order that keeps the limit.

May touch `stretto.ir` and the room of timing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.timing import UNIT_TIMES, PhaseTimes, peak_live

Urgency = Callable[[Action], float]
"""Smallest first; no two actions of a rank have the same."""


def list_orders(
    stage_ranks: Sequence[int],
    microbatches: int,
    urgency: Urgency,
    *,
    split: bool,
    stage_limit: int | None = None,
    rank_limit: float | None = None,
    weight_share: float = 1.0,
    in_turn: bool = False,
    spare_last: bool = False,
    times: PhaseTimes = UNIT_TIMES,
) -> tuple[tuple[Action, ...], ...]:
    """The order of actions of every rank.

    split: whether the backward is I and W, or B.
    stage_limit: the most live microbatches of a stage.
    rank_limit: the same of a rank, counted once for each of its stages; a microbatch that waits for W alone
        counts `weight_share` there.
    in_turn: see step 3.
    spare_last: whether W waits where it would hold up a rank's last input gradient that another stage
        needs.
    """
    limits = _Limits(stage_limit, rank_limit, weight_share)
    return _Walk(stage_ranks, microbatches, urgency, split, limits, in_turn, spare_last, times).orders


def limited(schedule: Schedule, max_live: int | None) -> Schedule:
    """The schedule with at most so many live microbatches a stage: itself where it has no more, else what a
    walk with its own order as urgency gives. It has F and B, or F, I and W, of every microbatch."""
    if max_live is None or max(peak_live(schedule)) <= max_live:
        return schedule
    place = {action: at for rank in range(schedule.ranks) for at, action in enumerate(schedule.actions(rank))}
    split = any(action.phase is Phase.W for action in place)
    orders = list_orders(
        schedule.stage_ranks, schedule.microbatches, place.__getitem__, split=split, stage_limit=max_live
    )
    return replace(schedule, orders=orders)


@dataclass(frozen=True, slots=True)
class _Limits:
    """As in `list_orders`."""

    stage: int | None
    rank: float | None
    weight_share: float


class _Walk:
    def __init__(
        self,
        stage_ranks: Sequence[int],
        microbatches: int,
        urgency: Urgency,
        split: bool,
        limits: _Limits,
        in_turn: bool,
        spare_last: bool,
        times: PhaseTimes,
    ) -> None:
        self.stage_ranks, self.microbatches, self.urgency = stage_ranks, microbatches, urgency
        self.limits, self.in_turn, self.spare_last, self.times = limits, in_turn, spare_last, times
        self.phases = (Phase.F, Phase.I, Phase.W) if split else (Phase.F, Phase.B)
        ranks = max(stage_ranks) + 1
        self.held = [[s for s, owner in enumerate(stage_ranks) if owner == rank] for rank in range(ranks)]
        self.done = {(stage, phase): 0 for stage in range(len(stage_ranks)) for phase in self.phases}
        self.end: dict[Action, float] = {}
        order: list[list[Action]] = [[] for _ in range(ranks)]
        free_at = [0.0] * ranks
        wakes = [(0.0, rank) for rank in range(ranks)]
        while wakes:
            now, rank = heapq.heappop(wakes)
            action = self._next(rank, now) if free_at[rank] <= now else None
            if action is None:
                continue
            self.done[action.stage, action.phase] += 1
            self.end[action] = free_at[rank] = now + times.of(action)
            order[rank].append(action)
            heapq.heappush(wakes, (free_at[rank], rank))
            receiver = self._receiver(action)
            if receiver is not None and receiver != rank:
                heapq.heappush(wakes, (free_at[rank] + times.message, receiver))
        assert all(count == microbatches for count in self.done.values()), "the walk stopped half way"
        self.orders = tuple(map(tuple, order))

    def _next(self, rank: int, now: float) -> Action | None:
        """Steps 1 to 3."""
        coming = [
            Action(stage, phase, self.done[stage, phase])
            for stage in self.held[rank]
            for phase in self.phases
            if self.done[stage, phase] < self.microbatches
        ]
        others = sorted((a for a in coming if a.phase is not Phase.W), key=self.urgency)
        weights = sorted((a for a in coming if a.phase is Phase.W), key=self.urgency)
        if (
            self.spare_last
            and weights
            and len(others) == 1
            and self._would_wait(others[0], weights[0], rank, now)
        ):
            weights = []
        for action in (*(others[:1] if self.in_turn else others), *weights):
            if self._ready(action, rank, now) and (action.phase is not Phase.F or self._fits(action, rank)):
                return action
        return None

    def _would_wait(self, last: Action, weight: Action, rank: int, now: float) -> bool:
        """Whether the rank's last input gradient, on its way to another rank, would be held up by W."""
        if last.stage == 0 or last.microbatch + 1 < self.microbatches or self._ready(last, rank, now):
            return False
        ends = [self.end.get(needed, math.inf) for needed in self._needs(last)]
        return max(ends) + self.times.message < now + self.times.of(weight)

    def _ready(self, action: Action, rank: int, now: float) -> bool:
        for needed in self._needs(action):
            if needed not in self.end:
                return False
            latency = 0.0 if self.stage_ranks[needed.stage] == rank else self.times.message
            if self.end[needed] + latency > now:
                return False
        return True

    def _needs(self, action: Action) -> list[Action]:
        stage, k = action.stage, action.microbatch
        if action.phase is Phase.F:
            return [Action(stage - 1, Phase.F, k)] if stage else []
        if action.phase is Phase.W:
            return [Action(stage, Phase.I, k)]
        after = [Action(stage + 1, self.phases[1], k)] if stage + 1 < len(self.stage_ranks) else []
        return [Action(stage, Phase.F, k), *after]

    def _fits(self, action: Action, rank: int) -> bool:
        backward, last = self.phases[1], self.phases[-1]
        limits, done = self.limits, self.done
        live = done[action.stage, Phase.F] - done[action.stage, last]
        if limits.stage is not None and live >= limits.stage:
            return False
        if limits.rank is None:
            return True
        whole = sum(done[stage, Phase.F] - done[stage, backward] for stage in self.held[rank])
        for_weights = sum(done[stage, backward] - done[stage, last] for stage in self.held[rank])
        return whole + limits.weight_share * for_weights + 1 <= limits.rank + 1e-9

    def _receiver(self, action: Action) -> int | None:
        """The rank of the stage that the action's result goes to."""
        if action.phase is Phase.W:
            return None
        target = action.stage + (1 if action.phase is Phase.F else -1)
        return self.stage_ranks[target] if 0 <= target < len(self.stage_ranks) else None
