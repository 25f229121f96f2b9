"""A collective's time out of its members' rounds."""

from __future__ import annotations

import pytest

from stretto.measure.time_collectives import _counted


@pytest.mark.parametrize(("lateness", "whole_us"), [(True, 10.0), (False, 5.0)])
def test_the_member_that_comes_last_has_not_waited_for_others(lateness: bool, whole_us: float) -> None:
    # Of 10 and 20 us the one has waited for the other for 6 and 14.
    members = [([10.0, 20.0], [1.0, 3.0]), ([4.0, 6.0], [1.0, 3.0])]
    whole, start, _ = _counted(members, lateness)
    assert whole == pytest.approx(whole_us)
    assert start == pytest.approx(2.0)
