"""The best order of a small step, by exact search (constraint programming, CP-SAT of `ortools`).

1. Every action is an interval; no two of a rank overlap. Each phase of a stage goes through the microbatches
   in ascending order, and what an action needs has ended and arrived before it begins.
2. What microbatches hold is a sum over intervals, from F to I and from I to W, that stays under the limit.
3. The end of the step is as early as can be, or the longest rank's time from its own begin. The search
   begins with a known order, and ends when that is proved, or when its budget of deterministic work is spent.

`ortools` is an extra: pip install 'stretto[exact]'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.room import Room
from stretto.schedule.timing import PhaseTimes, hops_of, time_schedule

TICKS = 10_000
"""Whole numbers that CP-SAT counts with, in the known order's time. What is found is timed anew."""

LARGEST = 200
"""Actions of the largest step for which the search is worth its while. Assumed: above it, the budget ends
with what it was given."""

BUDGET = 4.0
"""Deterministic work of the search, in the solver's own unit (about a second of one core). Assumed."""

PARTS = 100_000
"""Whole numbers that memory is counted in, of a rank's limit."""

PHASES = (Phase.F, Phase.I, Phase.W)


def best_order(
    known: Schedule,
    times: PhaseTimes,
    *,
    room: Room | None = None,
    max_live: int | None = None,
    from_own_begin: bool = False,
) -> Schedule | None:
    """An order with the backward split, from a known one; None where `ortools` is not there, where the step
    is too large, and where nothing is found. As `stretto.schedule.least.least_time` else."""
    if 3 * known.stages * known.microbatches > LARGEST:
        return None
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    return _Search(cp_model, known, times, room, max_live, from_own_begin).found()


def solver_of(cp: Any, budget: float) -> Any:
    """A solver that gives equal models equal answers. budget: deterministic work, in its own unit."""
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # it would end the search, and nobody would be told
    solver.parameters.max_deterministic_time = budget
    return solver


class _Search:
    def __init__(
        self,
        cp: Any,
        known: Schedule,
        times: PhaseTimes,
        room: Room | None,
        max_live: int | None,
        from_own_begin: bool,
    ) -> None:
        self.cp, self.known, self.model = cp, known, cp.CpModel()
        timing = time_schedule(known, times)
        self.scale = TICKS / timing.makespan if timing.makespan else 0.0
        self.stages, self.microbatches = range(known.stages), range(known.microbatches)
        self.times = times
        # Rounding may make the known order longer, by at most half a tick for each action and message.
        self.horizon = TICKS + 8 * known.stages * known.microbatches
        self.begin: dict[Action, Any] = {}
        self.takes: dict[Action, int] = {}
        for stage in self.stages:
            for k in self.microbatches:
                for phase in PHASES:
                    action = Action(stage, phase, k)
                    self.begin[action] = self.model.new_int_var(0, self.horizon, str(action))
                    self.takes[action] = round(times.of(action) * self.scale)
                    self._hint(action, timing.start)
        self._order()
        self._hold(room, max_live)
        self._end(from_own_begin)

    def found(self) -> Schedule | None:
        if not self.scale:
            return None
        solver = solver_of(self.cp, BUDGET)
        if solver.solve(self.model) not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None

        def at(action: Action) -> tuple[int, int, int, int]:
            # What takes no time begins with what follows it: by what needs what.
            forward = action.phase is Phase.F
            depth = action.stage if forward else 2 * self.known.stages - action.stage
            return solver.value(self.begin[action]), depth, PHASES.index(action.phase), action.microbatch

        ranks = self.known.stage_ranks
        orders = tuple(
            tuple(sorted((a for a in self.begin if ranks[a.stage] == rank), key=at))
            for rank in range(self.known.ranks)
        )
        return replace(self.known, family="exact", orders=orders)

    def _hint(self, action: Action, start: dict[Action, float]) -> None:
        whole = Action(action.stage, Phase.B, action.microbatch)
        at = start.get(action)
        if at is None:
            into = Action(action.stage, Phase.I, action.microbatch)
            at = start[whole] + (self.times.of(into) if action.phase is Phase.W else 0.0)
        self.model.add_hint(self.begin[action], round(at * self.scale))

    def _after(self, later: Action, earlier: Action, hop: float = 0.0) -> None:
        ends = self.begin[earlier] + self.takes[earlier] + round(hop * self.scale)
        self.model.add(self.begin[later] >= ends)

    def _order(self) -> None:
        """Step 1."""
        hops = hops_of(self.known.stage_ranks, self.times)
        for stage in self.stages:
            for k in self.microbatches:
                forward, into, weight = (Action(stage, phase, k) for phase in PHASES)
                self._after(into, forward)
                self._after(weight, into)
                if stage:
                    self._after(forward, Action(stage - 1, Phase.F, k), hops[stage - 1])
                    self._after(Action(stage - 1, Phase.I, k), into, hops[stage - 1])
                if k:
                    for action in (forward, into, weight):
                        self._after(action, replace(action, microbatch=k - 1))
        for rank in range(self.known.ranks):
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(self.begin[action], us, f"i{action}")
                for action, us in self.takes.items()
                if self.known.stage_ranks[action.stage] == rank
            )

    def _hold(self, room: Room | None, max_live: int | None) -> None:
        """Step 2. Room in whole numbers, rounded: who asks looks whether what is found fits."""
        if room is not None:
            for rank, limit in enumerate(room.limits):
                if 0 < limit < float("inf"):
                    mine = [s for s in self.stages if self.known.stage_ranks[s] == rank]
                    self._under(mine, [_share(held, limit) for held in room.whole], room, limit)
        if max_live is not None:
            for stage in self.stages:
                held = [self._between(stage, k, Phase.F, Phase.W) for k in self.microbatches]
                self.model.add_cumulative(held, [1] * len(held), max_live)

    def _under(self, mine: Sequence[int], whole: Sequence[int], room: Room, limit: float) -> None:
        held, sizes = [], []
        for stage in mine:
            for k in self.microbatches:
                held += [
                    self._between(stage, k, Phase.F, Phase.I),
                    self._between(stage, k, Phase.I, Phase.W, after=True),
                ]
                sizes += [whole[stage], _share(room.for_weight[stage], limit)]
        self.model.add_cumulative(held, sizes, PARTS)

    def _between(self, stage: int, k: int, first: Phase, last: Phase, after: bool = False) -> Any:
        """From the begin of one phase to the end of another, or from the end of the first."""
        one, other = Action(stage, first, k), Action(stage, last, k)
        start = self.begin[one] + (self.takes[one] if after else 0)
        end = self.begin[other] + self.takes[other]
        size = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_interval_var(start, size, end, "")

    def _end(self, from_own_begin: bool) -> None:
        """Step 3."""
        end = self.model.new_int_var(0, self.horizon, "end")
        for rank in range(self.known.ranks):
            mine = [action for action in self.begin if self.known.stage_ranks[action.stage] == rank]
            first: Any = 0
            if from_own_begin:
                first = self.model.new_int_var(0, self.horizon, "")
                self.model.add_min_equality(first, [self.begin[action] for action in mine])
            for action in mine:
                if action.phase is Phase.W:
                    self.model.add(end >= self.begin[action] + self.takes[action] - first)
        self.model.minimize(end)


def _share(held: float, limit: float) -> int:
    return math.floor(held / limit * PARTS)
