"""What communication costs at a rate of the network that was not measured, from rates that were.

The time of a message or collective is what its ends take plus bytes over rate, so along one over the rate it
is close to a line; where the ends are slower than the link, it is flat. Between two measured rates the line
through both is taken, beyond the slowest the line through the slowest two. The same is done for latencies and
for the processor time of a megabyte. Touches `stretto.ir` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from stretto.bench.mean import with_mean_ranks
from stretto.errors import UsageError
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve


def costs_at_rate(measured: Mapping[float, Costs], rate: float) -> Costs:
    """The costs of the fastest measured rate, with links and collectives of `rate`.

    measured: bits per second (`inf` for no limit) -> costs of one job on one layout. Collectives that one of
    them does not know are left out.

    Raises UsageError for fewer than two measured rates.
    """
    if len(measured) < 2:
        raise UsageError(f"costs at another rate need two measured rates or more, found {len(measured)}")
    rates = sorted(measured, reverse=True)
    costs = [measured[r] for r in rates]
    inverse = [0.0 if math.isinf(r) else 1.0 / r for r in rates]
    at = 0.0 if math.isinf(rate) else 1.0 / rate

    def value(of: Callable[[Costs], float]) -> float:
        return _on_lines(inverse, [of(c) for c in costs], at)

    def link(of: Callable[[Costs], Link]) -> Link:
        slowness = value(lambda c: 1.0 / of(c).bytes_per_us)
        return Link(
            value(lambda c: of(c).latency_us),
            1.0 / slowness if slowness > 0 else math.inf,
            value(lambda c: of(c).processor_us_per_mb),
            "interpolated between measured rates",
        )

    pairs = [key for key in costs[0].links if all(key in c.links for c in costs)]
    kinds = [key for key in costs[0].collectives if all(key in c.collectives for c in costs)]
    made = replace(
        costs[0],
        links={key: link(lambda c, key=key: c.links[key]) for key in pairs},  # type: ignore[misc]
        default_link=link(lambda c: c.default_link),
        collectives={key: _collective([c.collectives[key] for c in costs], inverse, at) for key in kinds},
        source=f"{costs[0].source}; communication interpolated between rates",
    )
    return with_mean_ranks(made, costs)


def _collective(found: list[CollectiveCost], inverse: list[float], at: float) -> CollectiveCost:
    sizes = sorted({nbytes for cost in found for nbytes, _ in cost.curve.points})
    points: list[tuple[float, float]] = []
    for nbytes in sizes:
        us = _on_lines(inverse, [cost.curve.us(nbytes) for cost in found], at)
        points.append((nbytes, max(us, points[-1][1]) if points else us))
    return CollectiveCost(
        Curve(tuple(points)),
        _on_lines(inverse, [cost.processor_us_per_mb for cost in found], at),
        _on_lines(inverse, [cost.slowdown for cost in found], at),
        "interpolated between measured rates",
        _on_lines(inverse, [cost.processor_us for cost in found], at),
    )


def _on_lines(xs: list[float], ys: list[float], at: float) -> float:
    """The value at `at` on the lines through neighbouring points (xs ascending), at least 0."""
    last = next((k for k in range(1, len(xs) - 1) if at <= xs[k]), len(xs) - 1)
    (x0, y0), (x1, y1) = (xs[last - 1], ys[last - 1]), (xs[last], ys[last])
    return max(0.0, y0 + (at - x0) * (y1 - y0) / (x1 - x0))
