"""Communication at a rate that was not measured lies on the line between those that were."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.bench.at_rate import costs_at_rate
from stretto.errors import UsageError
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve

ENDS_US_PER_BYTE = 0.002
LATENCY_US = 40.0


def costs(rate: float) -> Costs:
    """Ends and wire one after the other: the time that a line in one over the rate describes exactly."""
    slow = ENDS_US_PER_BYTE + (0.0 if math.isinf(rate) else 8e6 / rate)
    curve = Curve(tuple((n, LATENCY_US + n * slow) for n in (0.0, 1e5, 1e6)))
    link = Link(LATENCY_US, 1.0 / slow, 100.0, "measured")
    collectives = {("tp", "all_reduce"): CollectiveCost(curve, 900.0, 0.0, "measured", 50.0)}
    return Costs({(0, "mm"): 5.0}, {(0, 1): link}, link, 8.0, "measured", collectives, skew=0.1)


KNOWN = {rate: costs(rate) for rate in (1e8, 1e9, math.inf)}


@given(st.floats(min_value=2e7, max_value=1e11), st.floats(min_value=0, max_value=1e7))
def test_rates_between_and_beyond(rate: float, nbytes: float) -> None:
    found, expected = costs_at_rate(KNOWN, rate), costs(rate)
    curve, want = found.collectives["tp", "all_reduce"].curve, expected.collectives["tp", "all_reduce"].curve
    assert curve.us(nbytes) == pytest.approx(want.us(nbytes), rel=1e-6)
    assert found.link(0, 1).bytes_per_us == pytest.approx(expected.link(0, 1).bytes_per_us, rel=1e-6)
    assert found.default_link.latency_us == pytest.approx(LATENCY_US)
    assert found.collectives["tp", "all_reduce"].processor_us_per_mb == pytest.approx(900.0)
    assert found.collectives["tp", "all_reduce"].processor_us == pytest.approx(50.0)
    assert (found.op_us, found.skew) == (expected.op_us, pytest.approx(expected.skew))


def test_a_measured_rate_is_what_was_measured() -> None:
    for rate, known in KNOWN.items():
        found = costs_at_rate(KNOWN, rate).collectives["tp", "all_reduce"].curve
        for nbytes, us in known.collectives["tp", "all_reduce"].curve.points:
            assert found.us(nbytes) == pytest.approx(us)


def test_one_rate_says_nothing_of_others() -> None:
    with pytest.raises(UsageError, match="two measured rates or more, found 1"):
        costs_at_rate({1e8: costs(1e8)}, 2e8)


def test_what_one_rate_does_not_know_is_left_out() -> None:
    known = {1e8: replace(costs(1e8), collectives={}, links={}), 1e9: costs(1e9)}
    found = costs_at_rate(known, 2e8)
    assert not found.collectives
    assert not found.links
