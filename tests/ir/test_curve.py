"""Curves: interpolation, order, text form, fits through noise, the lower envelope of lines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.files.typed_file import from_text, to_line
from stretto.ir.curve import Curve

LINES = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 10)), min_size=1, max_size=6)
SAMPLES = st.lists(st.tuples(st.floats(1, 1e9), st.floats(0.1, 1e6)), min_size=1, max_size=12)


def test_between_below_and_beyond_the_points() -> None:
    curve = Curve(((100.0, 10.0), (200.0, 20.0), (400.0, 60.0)))
    assert [curve.us(x) for x in (0, 100, 150, 200, 300, 400, 500)] == [10, 10, 15, 20, 40, 60, 80]
    assert Curve(((8.0, 3.0),)).us(1e9) == 3.0


@given(SAMPLES, st.floats(0, 1e10), st.floats(0, 1e10))
def test_never_decreases(samples: list[tuple[float, float]], a: float, b: float) -> None:
    curve = Curve.fitted(samples)
    low, high = sorted((a, b))
    assert 0 <= curve.us(low) <= curve.us(high) < math.inf


@given(SAMPLES)
def test_text_form_gives_the_same_curve(samples: list[tuple[float, float]]) -> None:
    curve = Curve.fitted(samples)
    assert from_text(Curve, to_line(curve), "a curve") == curve


@given(LINES, st.floats(0, 1e6))
def test_lowest_is_the_fastest_line_everywhere(lines: list[tuple[float, float]], nbytes: float) -> None:
    fastest = min(latency + slope * nbytes for latency, slope in lines)
    assert Curve.lowest(lines).us(nbytes) == pytest.approx(fastest, rel=1e-6, abs=1e-6)


def test_fit_takes_what_disturbed_a_size_out() -> None:
    curve = Curve.fitted([(1024, 300.0), (2048, 80.0), (8192, 84.0), (2048, 95.0)])
    assert curve.us(2048) == 80.0
    assert curve.us(1024) == 80.0


def test_fit_draws_the_flattest_line_on_to_no_bytes() -> None:
    assert Curve.fitted([(100, 12.0), (200, 14.0)]).us(0) == 10.0


def test_a_disturbed_second_size_does_not_take_the_latency_away() -> None:
    """Twice as long for twice the bytes, by what else the machine did: the third size shows better."""
    assert Curve.fitted([(4096, 150.0), (8192, 305.0), (16384, 310.0)]).us(0) == pytest.approx(150 - 160 / 3)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "at least one point"),
        ([[0, 1], [0, 2]], "point 1"),
        ([[0, 5], [8, 2]], "faster than fewer bytes"),
        ([[0, -1]], "from 0"),
        ([[0, math.nan]], "finite"),
    ],
)
def test_refusals(pairs: list[list[float]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Curve(tuple((nbytes, us) for nbytes, us in pairs))
