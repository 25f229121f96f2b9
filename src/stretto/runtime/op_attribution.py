"""Whose ops ran when in a run of a window, which several actions may share.

    1. A window's items run in one order, and when its communications were called is known; so it is known
       which items ran between two calls.
    2. What each of these took of the time between is told by its cost.

Where calls and items do not fit together, the whole run is the first action's. A compiled window may run the
ops between two calls part by part; then the parts' times are right, and alternate as the plan says.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.ir.flow import ops_of_stage
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import STARTS, WAIT
from stretto.ir.transfers import time_of

Call = tuple[float, float]
"""When a communication was called, and when the call ended, in microseconds; starts and sends have no end of
their own."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One item of a window: its part, its cost in microseconds, and whether it calls a communication."""

    part: int
    us: float
    calls: bool


def turns_of(plan: Plan, window_name: str) -> tuple[Turn, ...]:
    """All items of a window, in their order."""
    window = plan.windows[window_name]
    ops = [ops_of_stage(plan.job.stages[stage], phase) for stage, phase in window.parts]
    found: list[Turn] = []
    for item in window.items:
        stage = window.parts[item.part][0]
        if item.kind is ItemKind.OP:
            op, _ = ops[item.part][str(item.ref)]
            us = time_of(plan.costs, stage, op)
            found.append(Turn(item.part, us, op.target == WAIT or op.target in STARTS))
        else:
            edge = plan.job.edges[int(item.ref)]
            found.append(Turn(item.part, 0.0, plan.rank_of(edge.source) != plan.rank_of(edge.target)))
    return tuple(found)


class Turns:
    """The parts of one run from `start_us` to `stop_us`. calls: those of the rank, ascending."""

    def __init__(self, turns: Sequence[Turn], calls: Sequence[Call], start_us: float, stop_us: float) -> None:
        first = bisect_left(calls, (start_us, start_us))
        here = calls[first : bisect_right(calls, (stop_us, stop_us))]
        self._since_us: list[float] = []
        self._parts: list[int] = []
        if len(here) == sum(turn.calls for turn in turns):
            self._walk(turns, here, start_us, stop_us)

    def _walk(self, turns: Sequence[Turn], calls: Sequence[Call], start_us: float, stop_us: float) -> None:
        ahead = iter(calls)
        between: list[Turn] = []
        for turn in turns:
            if turn.calls:
                begin_us, end_us = next(ahead)
                self._lay(between, start_us, begin_us)
                between, start_us = [], end_us
            between.append(turn)
        self._lay(between, start_us, stop_us)

    def _lay(self, turns: Sequence[Turn], at_us: float, until_us: float) -> None:
        """Step 2."""
        work_us = sum(turn.us for turn in turns)
        stretch = (until_us - at_us) / work_us if work_us else 0.0
        for turn in turns:
            if turn.us and (not self._parts or self._parts[-1] != turn.part):
                self._since_us.append(at_us)
                self._parts.append(turn.part)
            at_us += turn.us * stretch

    def pieces(self, start_us: float, stop_us: float) -> list[tuple[int, float, float]]:
        """(part, start, stop) of what ran from one time to another."""
        at = max(0, bisect_right(self._since_us, start_us) - 1)
        found: list[tuple[int, float, float]] = []
        while start_us < stop_us:
            until_us = self._since_us[at + 1] if at + 1 < len(self._since_us) else stop_us
            until_us = min(until_us, stop_us)
            if until_us > start_us:
                found.append((self._parts[at] if self._parts else 0, start_us, until_us))
            start_us, at = until_us, at + 1
        return found
