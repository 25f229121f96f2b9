"""What microbatches hold of a rank's memory, and how much each rank has for them.

Sums over stages that are one rank's; the unit is the caller's (bytes, or microbatches).
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.ir.action import Phase, Schedule

SLACK = 1e-9
"""Relative to a limit, what may exceed it: a few roundings of double precision."""


@dataclass(frozen=True, slots=True)
class Room:
    """limits: by rank, the most that microbatches may hold. whole: by stage, what a microbatch holds from its
    forward to the end of I (or B). for_weight: by stage, what it still holds from there to the end of W."""

    limits: tuple[float, ...]
    whole: tuple[float, ...]
    for_weight: tuple[float, ...]

    @staticmethod
    def even(ranks: int, stages: int, microbatches: float, weight_share: float = 1.0) -> Room:
        """Equal stages: a rank may hold so many microbatches on all its stages, of which those that wait for
        W alone count a share."""
        each = ranks / stages
        return Room((microbatches,) * ranks, (each,) * stages, (weight_share * each,) * stages)

    def holds(self, schedule: Schedule) -> bool:
        """Whether no rank holds more than it may."""
        return all(
            held <= limit * (1 + SLACK)
            for held, limit in zip(most_held(schedule, self), self.limits, strict=True)
        )


def most_held(schedule: Schedule, room: Room) -> tuple[float, ...]:
    """By rank, the most that its microbatches hold; it follows from the order alone. Of overlapped actions
    forwards count first."""
    result = []
    for order in schedule.orders:
        held = most = 0.0
        for slot in order:
            for action in sorted(slot.actions, key=lambda a: a.phase is not Phase.F):
                whole, rest = room.whole[action.stage], room.for_weight[action.stage]
                held += {Phase.F: whole, Phase.B: -whole, Phase.I: rest - whole, Phase.W: -rest}[action.phase]
                most = max(most, held)
        result.append(most)
    return tuple(result)
