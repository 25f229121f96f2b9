"""Heads and tails of the programs that a pipeline rank runs once a step.

An op begins when all that it reads is there, and what reads what it makes, or writes, comes after it. So what
a program makes for ops of actions is there no sooner than its longest chain takes; and an op that reads what
actions add to begins after each op that adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.program import Op
from stretto.ir.transfers import CollectiveTime


@dataclass(frozen=True, slots=True)
class StartedTime:
    """A collective of what lives over the step, and what it takes. axis: of its communicator, `pp` for
    ties."""

    name: str
    axis: str
    time: CollectiveTime


@dataclass(frozen=True, slots=True)
class OnceOp:
    """An op that runs once a step. us: on the compute lane; least_us: that, where the lane may be ahead of
    its ops' times; started: the collective that it starts."""

    op: Op
    us: float
    least_us: float
    started: StartedTime | None

    @property
    def travel_us(self) -> float:
        """From its end until what it makes is there."""
        return 0.0 if self.started is None else self.started.time.us


def begins_us(program: Sequence[OnceOp], there_us: dict[str, float]) -> dict[str, float]:
    """By op, when it may begin. there_us: when what the program reads and does not make may be there; grows
    by what it makes and writes."""
    result: dict[str, float] = {}
    for one in program:
        begin_us = max((there_us.get(name, 0.0) for name in one.op.uses), default=0.0)
        result[one.op.name] = begin_us
        for name in (one.op.name, *one.op.writes):
            there_us[name] = begin_us + one.least_us + one.travel_us
    return result


def rests_us(program: Sequence[OnceOp], follows_us: Mapping[str, float]) -> dict[str, float]:
    """By op, what must pass after its end, and after the collective that it starts. follows_us: what must
    pass once something is there that the program has made for others."""
    rests: dict[str, float] = dict(follows_us)
    result: dict[str, float] = {}
    for one in reversed(program):
        made = (one.op.name, *one.op.writes)
        rest_us = max(rests.pop(name, 0.0) for name in made)
        result[one.op.name] = rest_us
        for name in one.op.uses:
            rests[name] = max(rests.get(name, 0.0), one.least_us + one.travel_us + rest_us)
    return result
