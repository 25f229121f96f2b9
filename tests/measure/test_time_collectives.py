"""A collective's time out of its members' rounds."""

from __future__ import annotations

import pytest

from stretto.measure.time_collectives import counted


def test_the_member_that_comes_last_has_not_waited_for_others() -> None:
    # Of 10 and 20 us the one has waited for the other for 6 and 14.
    whole, start, _ = counted([[(10.0, 1.0), (20.0, 3.0)], [(4.0, 1.0), (6.0, 3.0)]])
    assert whole == pytest.approx(5.0)
    assert start == pytest.approx(2.0)
