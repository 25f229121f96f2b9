"""Cells predicted from others alone: plans of calibrated shapes and rates price a job that none of them is.

1. Op times of all calibrated plans of a layout become a calibration: an op of the same signature is looked
   up, others lie between ops of the same kind with less and more work (`stretto.cost.priced`). The machine
   has another speed at every time, so they are put in terms of a product that every cell has timed.
2. Links and collectives at the cell's rate lie between those of the calibrated rates
   (`stretto.cost.at_rate`).
3. The cell's plan, the very order that ran, is simulated with these costs; nothing else that was measured in
   the cell is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from stretto.cost.at_rate import costs_at_rate
from stretto.cost.calibration import Calibration
from stretto.cost.mean import with_mean_processors
from stretto.cost.op_cache import Machine, Timing, signature
from stretto.cost.priced import priced_ops
from stretto.cost.roofline import sizes_of, specs_of, traffic_bytes
from stretto.ir.costs import CollectiveCost, Costs
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.simulate import predict


def transferred(plan: Plan, rate: float, known: Mapping[float, Iterable[Plan]]) -> Plan:
    """The same plan with costs from other plans, and what they predict.

    rate: of the cell, in bits per second, `inf` for no limit. known: rate -> plans of calibrated cells of the
    same layout.
    """
    plans = {r: list(found) for r, found in known.items()}
    calibration = calibration_of([plan for found in plans.values() for plan in found])
    times = {key: priced.us for key, priced in priced_ops(plan.job, calibration).items()}
    merged = {r: _merged([p.costs for p in found]) for r, found in plans.items()}
    costs = merged[rate] if rate in merged else costs_at_rate(merged, rate)
    costs = replace(costs, op_us=times, shared=plan.costs.shared, source=f"transferred: {costs.source}")
    made = replace(plan, costs=costs)
    return replace(made, prediction=predict(made))


def at_speed(plan: Plan, slower: float) -> Plan:
    """The plan as if its ops had been measured when a product took `slower` times as long."""
    times = {key: us * slower for key, us in plan.costs.op_us.items()}
    return replace(plan, costs=replace(plan.costs, op_us=times))


def calibration_of(plans: Iterable[Plan]) -> Calibration:
    """The op times of plans as a calibration; ops of equal signature have the mean of their times."""
    times: dict[str, list[float]] = defaultdict(list)
    work: dict[str, tuple[int, int]] = {}
    for plan in plans:
        specs, sizes = specs_of(plan.job), sizes_of(plan.job)
        for stage in plan.job.stages:
            for ops in stage.ops.values():
                for op in ops:
                    us = plan.costs.op_us.get((stage.index, op.name))
                    if us:
                        key = signature(op, specs)
                        times[key].append(us)
                        work[key] = (op.flops, traffic_bytes(op, sizes))
    timings = {key: Timing(sum(found) / len(found), 0.0, *work[key]) for key, found in sorted(times.items())}
    return Calibration(Machine("this machine", "", 1), "calibrated cells", timings)


def _merged(costs: list[Costs]) -> Costs:
    """Costs of several shapes at one rate: a collective's curve goes through the points of all, and ranks
    are as uneven, and as slow after waiting, as they are on average."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    known: dict[tuple[str, str], list[CollectiveCost]] = defaultdict(list)
    for one in costs:
        for key, cost in one.collectives.items():
            points[key] += cost.curve.points
            known[key].append(cost)
    collectives = {
        key: replace(
            found[0],
            curve=Curve.fitted(points[key]),
            processor_us_per_mb=sum(c.processor_us_per_mb for c in found) / len(found),
            processor_us=sum(c.processor_us for c in found) / len(found),
            pace=sum(c.pace for c in found) / len(found),
        )
        for key, found in known.items()
    }
    return with_mean_processors(replace(costs[0], collectives=collectives), costs)
