"""Several measurements of one job count as their mean, figure by figure."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench.mean import mean_costs
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.processor import Processor

KEY = ("tp", "all_reduce")


def costs(scale: float, curve: Curve, rate: float = 10.0) -> Costs:
    link = Link(100.0 * scale, rate, 5.0 * scale, "measured")
    collective = CollectiveCost(curve, 8.0 * scale, 0.1, "measured", 20.0 * scale)
    op_us = {(0, "mm"): 50.0 * scale}
    return Costs(op_us, {(0, 1): link}, link, 1.0, "measured", {KEY: collective}, ("tp",), 0.02 * scale)


def test_the_mean_is_taken_of_every_figure() -> None:
    slow, fast = (
        costs(2.0, Curve(((0.0, 30.0), (100.0, 90.0)))),
        costs(1.0, Curve(((0.0, 10.0), (50.0, 20.0)))),
    )
    made = mean_costs([slow, fast])
    assert made.op_us == {(0, "mm"): 75.0}
    link = Link(150.0, pytest.approx(10.0), 7.5, "measured")
    assert made.links[0, 1] == made.default_link == link
    assert made.skew == pytest.approx(0.03)
    found = made.collectives[KEY]
    assert (found.processor_us_per_mb, found.processor_us) == (12.0, 30.0)
    # At 50 bytes the first takes 60, at 100 the second 30.
    assert found.curve.points == ((0.0, 20.0), (50.0, 40.0), (100.0, 60.0))


def test_a_quota_has_the_mean_of_what_ranks_do_under_it() -> None:
    one = costs(1.0, Curve(((0.0, 1.0),)))
    found = [replace(one, processor=Processor(100.0, 0.5, *of)) for of in ((0.7, 0.1), (0.9, 0.3))]
    made = mean_costs(found).processor
    assert made is not None
    assert (made.speed, made.skew) == (pytest.approx(0.8), pytest.approx(0.2))
    assert mean_costs([one, found[0]]).processor is None


def test_a_link_has_the_rate_of_the_mean_time() -> None:
    curve = Curve(((0.0, 1.0),))
    made = mean_costs([costs(1.0, curve, 10.0), costs(1.0, curve, 40.0)])
    assert made.default_link.bytes_per_us == pytest.approx(16.0)
    made = mean_costs([costs(1.0, curve, math.inf), costs(1.0, curve, math.inf)])
    assert made.default_link.bytes_per_us == math.inf


def test_one_measurement_stays_as_it_is() -> None:
    one = costs(1.0, Curve(((0.0, 1.0),)))
    assert mean_costs([one]) is one


points = st.lists(
    st.tuples(st.integers(0, 10**9), st.floats(0.0, 1e7)), min_size=1, max_size=6, unique_by=lambda p: p[0]
)


@given(points, points)
def test_the_mean_of_curves_lies_between_them(
    first: list[tuple[int, float]], second: list[tuple[int, float]]
) -> None:
    curves = [Curve.fitted([(float(n), us) for n, us in found]) for found in (first, second)]
    made = mean_costs([costs(1.0, curve) for curve in curves]).collectives[KEY].curve
    for nbytes, us in made.points:
        low, high = sorted(curve.us(nbytes) for curve in curves)
        assert low * (1 - 1e-9) <= us <= high * (1 + 1e-9)
