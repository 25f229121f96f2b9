"""One sign for all that is measured against what was predicted; below a bound in words."""

from __future__ import annotations

import pytest

from stretto.ir.compared import against, beside_bound, signed, slower


@pytest.mark.parametrize(
    ("measured", "predicted", "words"),
    [(103.1, 100, "+3.1%"), (97, 100, "-3.0%"), (100.001, 100, "+0.0%"), (99.999, 100, "+0.0%"), (5, 0, "-")],
)
def test_more_than_was_predicted_is_plus(measured: float, predicted: float, words: str) -> None:
    assert signed(against(measured, predicted)) == words


@pytest.mark.parametrize(
    ("difference", "words"),
    [(0.031, "3.1% slower than"), (-0.2, "20.0% faster than"), (0.0001, "as long as")],
)
def test_differences_in_sentences(difference: float, words: str) -> None:
    assert slower(difference) == words


@pytest.mark.parametrize(
    ("step_us", "words"),
    [(103.1, "3.1%"), (100.01, "none"), (99.99, "none"), (99.0, "1.0% below the bound")],
)
def test_a_step_below_its_bound_is_said_in_words(step_us: float, words: str) -> None:
    assert beside_bound(step_us, 100.0) == words
    assert beside_bound(step_us, 0.0) == "-"
