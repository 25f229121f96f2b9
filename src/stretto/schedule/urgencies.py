"""What is urgent, by rules that know how long phases take: for `stretto.schedule.list_schedule`.

* `backward_first`: input gradients before forwards, older microbatches first. Memory is what holds a rank
  back.
* `warm_up_first`, one stage a rank, in turn (heuristic of arXiv 2401.10241, section 3): as many forwards as
  end before the first input gradient can arrive, and as memory allows; then an input gradient and a forward
  in turn. A smaller number may be better, as a forward that has begun holds up an input gradient that
  arrives: on all ranks but the first, a part of a forward is given up.
* `periodic`: a microbatch's actions have a time each, the same for all microbatches, one period apart (the
  building block of arXiv 2405.15362, for any times). The period is at best what the busiest rank works for a
  microbatch, which is then never idle. A microbatch goes through the stages and back as soon as each rank has
  room in its period for the action, such that what the rank has yet to place still fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stretto.ir.action import Action, Phase
from stretto.schedule.list_schedule import Urgency
from stretto.schedule.timing import PhaseTimes, hops_of

ROUNDING = 1e-9
"""Relative to a period, what two times are apart that are equal."""


def backward_first(stages: int, microbatches: int) -> Urgency:
    """Input gradients, then forwards, each with the oldest microbatch and the last stage first."""

    def urgency(action: Action) -> float:
        later = microbatches if action.phase is Phase.F else 0
        return (later + action.microbatch) * stages + stages - 1 - action.stage

    return urgency


def warm_up_first(
    ranks: int, microbatches: int, times: PhaseTimes, memory: float, given_up: float
) -> Urgency:
    """See above. memory: the most live microbatches of a rank. given_up: as a part of a forward."""
    place: dict[Action, int] = {}
    for rank, warm_up in enumerate(_warm_ups(ranks, times, memory, given_up)):
        first = min(warm_up, microbatches)
        order = [Action(rank, Phase.F, k) for k in range(first)]
        for k in range(microbatches):
            order.append(Action(rank, Phase.I, k))
            if first + k < microbatches:
                order.append(Action(rank, Phase.F, first + k))
        place.update((action, at) for at, action in enumerate(order))
    return lambda action: place.get(action, action.microbatch)


def _warm_ups(ranks: int, times: PhaseTimes, memory: float, given_up: float) -> list[int]:
    """They never grow from rank to rank, so that the order cannot deadlock."""
    forward = [times.of(Action(rank, Phase.F, 0)) for rank in range(ranks)]
    backward = [times.of(Action(rank, Phase.I, 0)) for rank in range(ranks)]
    hops = hops_of(range(ranks), times)
    found: list[int] = []
    for rank in range(ranks):
        until = sum(forward[rank:]) + sum(backward[rank + 1 :]) + 2 * sum(hops[rank:])
        fits = until / forward[rank] if forward[rank] > 0 else math.inf
        most = min(memory, found[-1] if found else memory)
        found.append(max(1, math.floor(min(fits - (given_up if rank else 0.0) + ROUNDING, most))))
    return found


def periodic(stage_ranks: Sequence[int], times: PhaseTimes, longer: float = 1.0) -> Urgency | None:
    """See above. longer: times the shortest period. None where a rank's actions do not fit in it."""
    stages = len(stage_ranks)
    hops = hops_of(stage_ranks, times)
    way = [(stage, Phase.F) for stage in range(stages)]
    way += [(stage, Phase.I) for stage in reversed(range(stages))]
    takes = {(s, phase): times.of(Action(s, phase, 0)) for s in range(stages) for phase in Phase.B.parts}
    takes |= {(s, Phase.F): times.of(Action(s, Phase.F, 0)) for s in range(stages)}
    ranks = max(stage_ranks) + 1
    left = [[us for (s, _), us in takes.items() if stage_ranks[s] == rank] for rank in range(ranks)]
    period = longer * max(map(math.fsum, left))
    if period <= 0:
        return None
    circles = [_Circle(period) for _ in range(ranks)]
    at: dict[tuple[int, Phase], float] = {}
    now, here = 0.0, 0
    for stage, phase in way:
        if stage != here:
            now, here = now + hops[min(stage, here)], stage
        rank, us = stage_ranks[stage], takes[stage, phase]
        left[rank].remove(us)
        begin = circles[rank].place(now, us, left[rank])
        if begin is None:
            return None
        at[stage, phase] = begin
        now = begin + us
    # Weight gradients in what is left, the longest first.
    for stage in sorted(range(stages), key=lambda s: -takes[s, Phase.W]):
        rank, us = stage_ranks[stage], takes[stage, Phase.W]
        left[rank].remove(us)
        begin = circles[rank].place(at[stage, Phase.I] + takes[stage, Phase.I], us, left[rank])
        if begin is None:
            return None
        at[stage, Phase.W] = begin
    return lambda action: at[action.stage, action.phase] + action.microbatch * period


class _Circle:
    """A rank's time within a period, which comes round."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.least = period * ROUNDING
        self.taken: list[tuple[float, float]] = []

    def place(self, ready: float, us: float, left: Sequence[float]) -> float | None:
        """The first time from `ready` on at which `us` are free, and what is left still fits elsewhere; taken
        from then on. None where there is none."""
        places = {ready}
        for begin, end in self.taken:
            for edge in (end, begin - us):
                places.add(ready + (edge - ready) % self.period)
        for begin in sorted(places):
            with_it = self._with(begin, us)
            if with_it is not None and self._fit(with_it, left):
                self.taken = with_it
                return begin
        return None

    def _with(self, begin: float, us: float) -> list[tuple[float, float]] | None:
        """What is taken, with one more; None where it meets another."""
        first = begin % self.period
        if first > self.period - self.least:
            first = 0.0
        pieces = [(first, min(first + us, self.period))]
        if first + us > self.period + self.least:
            pieces.append((0.0, first + us - self.period))
        for start, end in pieces:
            for other, until in self.taken:
                if min(end, until) - max(start, other) > self.least:
                    return None
        return sorted([*self.taken, *pieces])

    def _fit(self, taken: Sequence[tuple[float, float]], left: Sequence[float]) -> bool:
        """Whether the rest can be placed in the gaps, each longest one in the first that has room."""
        gaps: list[float] = []
        reached = 0.0
        for begin, end in taken:
            gaps.append(begin - reached)
            reached = max(reached, end)
        last = self.period - reached
        # The end of the period goes on at its begin.
        if gaps:
            gaps[0] += last
        else:
            gaps.append(last)
        for us in sorted(left, reverse=True):
            at = next((k for k, gap in enumerate(gaps) if gap >= us - self.least), None)
            if at is None:
                return False
            gaps[at] -= us
        return True
