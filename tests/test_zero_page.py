"""docs/zero.md shows what plans say, and these are the textbook's bytes."""

from __future__ import annotations

import pytest

from tests import zero_page


def test_the_page_shows_the_plan_and_the_bytes() -> None:
    shown = zero_page.shown(zero_page.PAGE.read_text(encoding="utf-8"))
    assert shown == zero_page.made(), "write it again: python -m tests.zero_page"
    for *_, textbook, plan in zero_page.rows():
        assert float(plan) == pytest.approx(float(textbook), rel=0.05)
