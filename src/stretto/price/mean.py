"""What several measurements of one job on the same ranks say together: the mean of each figure.

A machine that others use is slow in one minute and fast in the next, and its network's ends with it. Touches
`stretto.ir` only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.ir.costs import CollectiveCost, Costs, Link, Quota, Unsteady
from stretto.ir.curve import Curve


def mean_costs(found: Sequence[Costs]) -> Costs:
    """The mean of costs that name the same ops, links and collectives.

    A link's rate is the one at which bytes take their mean time; a collective's curve has the mean time at
    every size that one of the curves has a point for. All else is the first's.
    """
    first = found[0]
    if len(found) == 1:
        return first
    mean = replace(
        first,
        op_us={key: statistics.fmean(costs.op_us[key] for costs in found) for key in first.op_us},
        links={key: _link([costs.links[key] for costs in found]) for key in first.links},
        default_link=_link([costs.default_link for costs in found]),
        collectives={
            key: _collective([costs.collectives[key] for costs in found]) for key in first.collectives
        },
    )
    return with_mean_processors(mean, found)


def with_mean_processors(costs: Costs, found: Sequence[Costs]) -> Costs:
    """The costs with the mean of what processors were found to do, which neither ops nor networks touch."""
    return replace(
        costs,
        skew=statistics.fmean(one.skew for one in found),
        quota=_quota(found),
        cold=statistics.fmean(one.cold for one in found),
        unsteady=_unsteady([one.unsteady for one in found if one.unsteady is not None]),
    )


def _unsteady(found: Sequence[Unsteady]) -> Unsteady | None:
    if not found:
        return None
    return Unsteady(
        math.sqrt(statistics.fmean(one.spread**2 for one in found)),
        statistics.fmean(one.spell_us for one in found),
        statistics.fmean(one.common for one in found),
    )


def _quota(found: Sequence[Costs]) -> Quota | None:
    """The first's quota, with the mean of what ranks do under it."""
    first = found[0].quota
    quotas = [costs.quota for costs in found if costs.quota is not None]
    if first is None:
        return None
    speed = statistics.fmean(quota.speed for quota in quotas)
    return replace(first, speed=speed, skew=statistics.fmean(quota.skew for quota in quotas))


def _link(found: Sequence[Link]) -> Link:
    slowness = statistics.fmean(1.0 / link.bytes_per_us for link in found)
    return replace(
        found[0],
        latency_us=statistics.fmean(link.latency_us for link in found),
        bytes_per_us=1.0 / slowness if slowness else math.inf,
        processor_us_per_mb=statistics.fmean(link.processor_us_per_mb for link in found),
        slower=statistics.fmean(link.slower for link in found),
        buffered_bytes=statistics.fmean(link.buffered_bytes for link in found),
    )


def _collective(found: Sequence[CollectiveCost]) -> CollectiveCost:
    def mean(of: Callable[[CollectiveCost], float]) -> float:
        return statistics.fmean(of(cost) for cost in found)

    sizes = sorted({nbytes for cost in found for nbytes, _ in cost.curve.points})
    points: list[tuple[float, float]] = []
    for nbytes in sizes:
        us = statistics.fmean(cost.curve.us(nbytes) for cost in found)
        # A mean of curves never falls, but for a rounding.
        points.append((nbytes, max(us, points[-1][1]) if points else us))
    return replace(
        found[0],
        curve=Curve(tuple(points)),
        processor_us_per_mb=mean(lambda cost: cost.processor_us_per_mb),
        processor_us=mean(lambda cost: cost.processor_us),
        slowdown=mean(lambda cost: cost.slowdown),
        pace=1.0 / mean(lambda cost: 1.0 / cost.pace),
        slower=mean(lambda cost: cost.slower),
    )
