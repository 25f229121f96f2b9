"""Cells predicted from others alone: calibrated shapes and rates price a job that none of them is.

1. The ops of the calibrated shapes, timed beside the cell (`stretto.bench.visits`), are a calibration: an op
   of the same signature is looked up, a product comes from a fit, others lie between ops of the same kind
   with less and more work (`stretto.price.priced`).
2. Links and collectives at the cell's rate lie between those of the calibrated rates
   (`stretto.bench.at_rate`). What ranks and collectives do to each other is that of calibrated plans that
   communicate alike: with sequence parallelism, or without. What starts and waits take on the compute lane
   is a line over bytes, through those of all calibrated plans.
3. The cell's plan, the very order that ran, is simulated with these costs; nothing else that was measured in
   the cell is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from stretto.bench.at_rate import costs_at_rate
from stretto.bench.mean import with_mean_ranks
from stretto.ir.costs import Costs
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT, Job
from stretto.measure.calls import Calls, calls_us, line_through
from stretto.price.calibration import Calibration
from stretto.price.priced import priced_ops
from stretto.simulate import predict

Key = tuple[str, str]
"""(axis, kind) of collectives."""


def transferred(
    plan: Plan, rate: float, calibration: Calibration, known: Mapping[float, Iterable[Plan]]
) -> Plan:
    """The same plan with costs from elsewhere, and what they predict.

    rate: of the cell, in bits per second, `inf` for no limit. calibration: has op times. known: rate -> plans
    of calibrated cells of the same layout, which say what communication costs.
    """
    plans = {r: list(found) for r, found in known.items()}
    times = {key: priced.us for key, priced in priced_ops(plan.job, calibration).items()}
    times |= calls_us(plan.job, calls_of(one for found in plans.values() for one in found))
    merged = {r: _merged(found, all_reduces(plan.job)) for r, found in plans.items()}
    costs = merged[rate] if rate in merged else costs_at_rate(merged, rate)
    costs = replace(
        costs, op_us=times, op_how={}, shared=plan.costs.shared, source=f"transferred: {costs.source}"
    )
    made = replace(plan, costs=costs)
    return replace(made, prediction=predict(made))


def calls_of(plans: Iterable[Plan]) -> dict[Key, Calls]:
    """What the ops take that start and await collectives, by (axis, kind), from the times of plans."""
    starts, waits = (defaultdict[Key, dict[int, list[float]]](lambda: defaultdict(list)) for _ in range(2))
    for plan in plans:
        for stage in plan.job.stages:
            ops = [op for made in stage.ops.values() for op in made]
            asked = {op.name: op.collective for op in ops if op.collective is not None}
            for op in ops:
                us = plan.costs.op_us.get((stage.index, op.name))
                begun = asked.get(op.uses[0]) if op.target == WAIT else op.collective
                if us is not None and begun is not None:
                    found = waits if op.target == WAIT else starts
                    found[begun.axis, begun.kind][begun.nbytes].append(us)

    def line(found: Mapping[int, Sequence[float]]) -> tuple[float, float]:
        return line_through([(nbytes, fmean(took)) for nbytes, took in found.items()])

    calls = {}
    for key in starts.keys() & waits.keys():
        (start_us, start_us_per_mb), (finish_us, finish_us_per_mb) = line(starts[key]), line(waits[key])
        calls[key] = Calls(start_us, start_us_per_mb, finish_us_per_mb, finish_us)
    return calls


def all_reduces(job: Job) -> bool:
    """Whether most of what its collectives move is all-reduced, as without sequence parallelism."""
    moved: dict[bool, int] = defaultdict(int)
    for stage in job.stages:
        for ops in stage.ops.values():
            for asked in (op.collective for op in ops if op.collective is not None):
                moved[asked.kind == "all_reduce"] += asked.nbytes
    return moved[True] >= moved[False]


def _merged(plans: Sequence[Plan], reduces: bool) -> Costs:
    """Costs of several shapes at one rate: a collective's curve goes through the points of all. What it
    takes of processors, and how uneven ranks are, is the mean of those that
    all-reduce most of what they move, or of those that do not; of all where there are none."""
    costs = [plan.costs for plan in plans]
    alike = [plan.costs for plan in plans if all_reduces(plan.job) is reduces] or costs
    points: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for one in costs:
        for key, cost in one.collectives.items():
            points[key] += cost.curve.points
    collectives = {}
    for key in points:
        found = [one.collectives[key] for one in alike if key in one.collectives]
        found = found or [one.collectives[key] for one in costs if key in one.collectives]
        collectives[key] = replace(
            found[0],
            curve=Curve.fitted(points[key]),
            processor_us_per_mb=fmean(cost.processor_us_per_mb for cost in found),
            processor_us=fmean(cost.processor_us for cost in found),
        )
    return with_mean_ranks(replace(costs[0], collectives=collectives), alike)
