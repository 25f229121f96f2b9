"""The best order of a small step, by constraint programming: what the search for schedules is compared with.

1. Every action is an interval; no two of a rank overlap. Each phase of a stage goes through the microbatches
   in ascending order, and what an action needs has ended and arrived before it begins.
2. A microbatch is live on its stage from the begin of F to the end of W; no more are than the limit.
3. The end of the step is as early as can be.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from stretto.ir.action import Action, Phase
from stretto.schedule.timing import PhaseTimes, hops_of

PHASES = (Phase.F, Phase.I, Phase.W)

BUDGET = 20.0
"""Work of the solver, in its own deterministic unit, about a second of a core."""


def shortest_time(
    stage_ranks: tuple[int, ...], microbatches: int, times: PhaseTimes, *, max_live: int | None = None
) -> int:
    """The shortest makespan with the backward split; times are integers. Skips the test where `ortools`
    is absent, and fails it where the solver cannot prove its answer."""
    cp = pytest.importorskip("ortools.sat.python.cp_model", reason="ortools, the exact solver, is absent")
    model = cp.CpModel()
    stages = range(len(stage_ranks))
    actions = [Action(s, phase, k) for s, phase, k in product(stages, PHASES, range(microbatches))]
    takes = {action: int(times.of(action)) for action in actions}
    hops = [int(hop) for hop in hops_of(stage_ranks, times)]
    horizon = sum(takes.values()) + 2 * microbatches * sum(hops)
    begin: dict[Action, Any] = {a: model.new_int_var(0, horizon, str(a)) for a in actions}
    end = model.new_int_var(0, horizon, "end")

    def after(later: Action, earlier: Action, hop: int = 0) -> None:
        model.add(begin[later] >= begin[earlier] + takes[earlier] + hop)

    for action in actions:
        stage, k = action.stage, action.microbatch
        model.add(end >= begin[action] + takes[action])
        if k:
            after(action, replace(action, microbatch=k - 1))
        if action.phase is not Phase.F:
            after(action, replace(action, phase=PHASES[PHASES.index(action.phase) - 1]))
        if action.phase is Phase.F and stage:
            after(action, replace(action, stage=stage - 1), hops[stage - 1])
        if action.phase is Phase.I and stage + 1 < len(stage_ranks):
            after(action, replace(action, stage=stage + 1), hops[stage])
    for rank in set(stage_ranks):
        mine = [action for action in actions if stage_ranks[action.stage] == rank]
        model.add_no_overlap(model.new_fixed_size_interval_var(begin[a], takes[a], str(a)) for a in mine)
    for stage in stages if max_live is not None else ():
        live = []
        for k in range(microbatches):
            first, last = Action(stage, Phase.F, k), Action(stage, Phase.W, k)
            size = model.new_int_var(0, horizon, "")
            live.append(model.new_interval_var(begin[first], size, begin[last] + takes[last], ""))
        model.add_cumulative(live, [1] * microbatches, max_live)
    model.minimize(end)
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = BUDGET
    assert solver.solve(model) == cp.OPTIMAL
    return int(solver.objective_value)
