"""What several measurements of one job on the same ranks say together: the mean of each figure.

A machine that others use is slow in one minute and fast in the next, and its network's ends with it. Touches
`stretto.ir` only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from stretto.ir.costs import CollectiveCost, Costs, Link
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
    return with_mean_ranks(mean, found)


def with_mean_ranks(costs: Costs, found: Sequence[Costs]) -> Costs:
    """The costs with the mean of how far ranks come apart, which neither ops nor networks touch."""
    processors = [one.processor for one in found if one.processor is not None]
    first = found[0].processor
    if first is not None:
        speed = statistics.fmean(one.speed for one in processors)
        first = replace(first, speed=speed, skew=statistics.fmean(one.skew for one in processors))
    return replace(costs, skew=statistics.fmean(one.skew for one in found), processor=first)


def _link(found: Sequence[Link]) -> Link:
    slowness = statistics.fmean(1.0 / link.bytes_per_us for link in found)
    return replace(
        found[0],
        latency_us=statistics.fmean(link.latency_us for link in found),
        bytes_per_us=1.0 / slowness if slowness else math.inf,
        processor_us_per_mb=statistics.fmean(link.processor_us_per_mb for link in found),
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
    )
