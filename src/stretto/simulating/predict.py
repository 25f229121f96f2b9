"""A plan's prediction: the simulated step's accounts by rank, and the bound that it is measured against."""

from __future__ import annotations

from dataclasses import replace

from stretto.bounds.step import lower_bound
from stretto.ir.costs import Prediction
from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.simulating.engine import simulate
from stretto.simulating.memory import memory_parts


def predict(plan: Plan, timeline: Timeline | None = None) -> Prediction:
    """Take the simulated step of `plan` (or its `timeline`) and bound it; microseconds and bytes, lists by
    rank.

    Raises PlanError for what `simulate` and `lower_bound` refuse.
    """
    timeline = simulate(plan) if timeline is None else timeline
    bound = lower_bound(plan.job, plan.schedule, plan.costs)
    parts = memory_parts(plan, timeline.peak_bytes)
    return replace(accounts_of(timeline), bound_us=bound.us, binds=bound.binds, memory=parts)


def accounts_of(timeline: Timeline) -> Prediction:
    """What a simulated timeline alone says of its plan; `bound_us` is 0, which is none."""
    return Prediction(
        step_us=timeline.step_us,
        compute_us=timeline.by_rank(SpanKind.COMPUTE),
        exposed_us=timeline.by_rank(SpanKind.EXPOSED),
        bubble_us=timeline.by_rank(SpanKind.BUBBLE),
        peak_bytes=timeline.peak_bytes,
        bound_us=0.0,
        binds="",
        exposed_axis_us=timeline.exposed_axis_us(),
        comm_axis_us=timeline.comm_axis_us(),
    )
