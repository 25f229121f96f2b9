"""A pass on a job by itself, and costs for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from stretto.ir.action import Schedule
from stretto.ir.costs import NO_LINK, CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.program import Job
from stretto.passes.step import Context, LeftOutError, Pass, Step
from stretto.planning.make_plan import listed
from stretto.schedule.families import make_schedule

Peaks = Callable[[Job], Sequence[int]]


def step_of(
    job: Job, schedule: Schedule | None = None, costs: Costs | None = None, peaks: Peaks | None = None
) -> tuple[Step, Context]:
    """The job's step, by default by 1F1B and without costs, and what passes may ask."""
    chosen = schedule or make_schedule("1f1b", len(job.stages), job.microbatches)

    def most(step: Step, about: bool) -> Sequence[int]:
        assert peaks is not None
        return peaks(step.job)

    prices = listed(job, costs or Costs({}, {}, NO_LINK, 0.0, "none"))
    return Step(job, chosen, chosen, "local"), Context(prices, "captured", most)


def after(
    apply: Pass,
    job: Job,
    costs: Costs | None = None,
    schedule: Schedule | None = None,
    peaks: Peaks | None = None,
) -> tuple[Job, Costs]:
    """The job after a pass, the job itself where that leaves it out, and its costs."""
    step, context = step_of(job, schedule, costs, peaks)
    with suppress(LeftOutError):
        step = apply(step, context)
    return step.job, context.costs_of(step.job)


KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def costs_of(
    job: Job, *, link: float, gather: float, latency_us: float = 0.0, shared: tuple[str, ...] = ()
) -> Costs:
    """Every op takes a microsecond. link, gather: bytes a microsecond of messages, and of collectives."""
    op_us = {(s.index, op.name): 1.0 for s in job.stages for ops in s.ops.values() for op in ops}
    line = CollectiveCost(Curve(((0.0, latency_us), (1e6, latency_us + 1e6 / gather))))
    collectives = {("tp", kind): line for kind in KINDS}
    return Costs(op_us, {}, Link(latency_us, link), 0.0, "made up", collectives, shared)
