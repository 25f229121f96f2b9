"""Costs that are measured again at the end of a run whose steps were faster than they let any step be.

Costs are measured before the first step. Where others used the processors in that minute, ops are too long in
them, and a run ends "below the bound". All ranks then measure once more, as races do (`benchmarks/kept.py`),
and the plan, whose order stays, is predicted with these costs. The run's folder keeps the plan as it was made
in `planned.json`. On accelerators, where nobody else computes, nothing is measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stretto.ir.compared import SHOWN, against
from stretto.ir.plan import Plan
from stretto.ir.timeline import Timeline
from stretto.measure.measured import measured_costs
from stretto.schedule.sums import without_sums
from stretto.simulating import predict
from stretto.train.metrics import writing
from stretto.train.run_files import PLANNED, write_plan


def plan_that_holds(
    plan: Plan, timelines: Sequence[Timeline], run_dir: Path, first: bool, say: Callable[[str], None]
) -> Plan:
    """The plan, or with costs that are measured now. timelines: of the last steps, the same on all ranks,
    which must all call it. first: whether this rank writes the run's folder. Raises StrettoError."""
    found = plan.prediction
    if found is None or not timelines or plan.job.device != "cpu":
        return plan
    ordered = sorted(timeline.step_us for timeline in timelines)
    gap = against(ordered[len(ordered) // 2], found.bound_us)
    if gap is None or gap > -SHOWN:
        return plan
    say(f"steps were {-gap:.1%} faster than the costs from before let any step be: measuring them again")
    made = replace(plan, costs=measured_costs(without_sums(plan.job), plan.schedule))
    made = replace(made, prediction=predict(made))
    if first:
        with writing(run_dir):
            plan.save(run_dir / PLANNED)
            write_plan(run_dir, made)
    return made
