"""The step that a plan's ranks are expected to have: what `stretto.simulate` gives, and a plan promises.

Ranks whose speed goes up and down (`Costs.unsteady`) wait for each other, and lanes run empty, at times that
a step of even speed does not have. So of several steps that chance makes it is the one nearest to their mean
in what it takes and in what stays exposed. May touch this room.
"""

from __future__ import annotations

from statistics import fmean

from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.simulate.engine import one_step

STEPS = 12
"""Steps that are simulated, in pairs. Of GPTs on two ranks the mean is then known to half a percent."""

MOST_OPS = 200_000
"""Ops that are walked at most, in two steps at least: longer steps differ less."""


def simulate(plan: Plan) -> Timeline:
    """Predict the timeline of a step of `plan`: spans, accounts and memory of every rank.

    Times are microseconds from the step's common start, memory is bytes. Of ranks with steady speeds it is
    the step that they have (`one_step`). Raises PlanError when ranks wait for each other for ever, and for
    windows, ops or costs that are missing.
    """
    if plan.costs.unsteady is None:
        return one_step(plan)
    found = [one_step(plan, draw) for draw in range(_steps(plan))]
    mean_us = fmean(timeline.step_us for timeline in found)
    exposed_us = fmean(map(_exposed_us, found))
    return min(found, key=lambda one: abs(one.step_us - mean_us) + abs(_exposed_us(one) - exposed_us))


def _exposed_us(timeline: Timeline) -> float:
    return fmean(timeline.by_rank(SpanKind.EXPOSED))


def _steps(plan: Plan) -> int:
    ops = plan.job.microbatches * sum(len(ops) for stage in plan.job.stages for ops in stage.ops.values())
    return max(2, min(STEPS, MOST_OPS // max(ops, 1) // 2 * 2))
