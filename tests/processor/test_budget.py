"""A quota's time: what a lane does in it, and when work ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.ir.costs import Processor
from stretto.processor.budget import Budget


class OneByOne:
    """The contract, each period by itself."""

    def __init__(self, quota: Processor) -> None:
        self.quota = quota
        self.left_us = quota.period_us * quota.share
        self.periods = 0
        """That are over."""

    def run(self, since_us: float, now_us: float, load: float, working: bool) -> float:
        quota, taken, ran_us = self.quota, load * self.quota.share, 0.0
        while since_us < now_us:
            until_us = (self.periods + 1) * quota.period_us
            end_us = min(now_us, until_us)
            mine_us = min(end_us - since_us, max(0.0, self.left_us) / quota.speed) if working else 0.0
            ran_us += mine_us
            self.left_us -= mine_us * quota.speed + (end_us - since_us - mine_us) * taken
            if end_us == until_us:
                self.left_us = min(0.0, self.left_us) + quota.period_us * quota.share
                self.periods += 1
            since_us = end_us
        return ran_us * (quota.speed - taken) / quota.share


quotas = st.builds(
    lambda period_us, share, faster: Processor(period_us, share, share + faster * (1.0 - share)),
    st.sampled_from((100.0, 10_000.0)),
    st.floats(0.1, 0.9),
    st.floats(0.0, 1.0),
)
stretches = st.lists(
    st.tuples(st.floats(0.01, 20.0), st.sampled_from((0.0, 0.1, 0.5, 0.9, 1.0)), st.booleans()),
    min_size=1,
    max_size=8,
)
"""(periods, load, whether the lane works)"""


@settings(max_examples=500, deadline=None)
@given(quotas, stretches)
def test_work_is_that_of_the_single_periods(quota: Processor, drawn: list[tuple[float, float, bool]]) -> None:
    budget, slow = Budget(quota), OneByOne(quota)
    now_us = 0.0
    for periods, load, working in drawn:
        since_us, now_us = now_us, now_us + periods * quota.period_us
        expected = slow.run(since_us, now_us, load, working)
        assert budget.run(since_us, now_us, load, working) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@settings(max_examples=500, deadline=None)
@given(quotas, stretches, st.floats(1e-3, 30.0), st.sampled_from((0.0, 0.01, 0.3, 0.9, 1.0)))
def test_work_ends_when_all_of_it_has_been_run(
    quota: Processor, drawn: list[tuple[float, float, bool]], periods: float, load: float
) -> None:
    budget, slow = Budget(quota), OneByOne(quota)
    now_us = 0.0
    for before, at_load, working in drawn:
        since_us, now_us = now_us, now_us + before * quota.period_us
        budget.run(since_us, now_us, at_load, working)
        slow.run(since_us, now_us, at_load, working)
    work_us = periods * quota.period_us
    end_us = budget.end(now_us, work_us, load)
    if end_us is None:
        assert load == 1.0
        assert slow.run(now_us, now_us + 1_000 * quota.period_us, load, True) <= work_us + 1e-3
        return
    assert end_us >= now_us
    half_us = now_us + 0.5 * (end_us - now_us)
    done = budget.run(now_us, half_us, load, True) + budget.run(half_us, end_us, load, True)
    assert done == pytest.approx(work_us, rel=1e-9, abs=1e-5), "as it counts itself"
    just_before_us = now_us + (1.0 - 1e-9) * (end_us - now_us)
    most = slow.run(now_us, just_before_us, load, True)
    assert most <= work_us * (1.0 + 1e-9) + 1e-6
    assert most + slow.run(just_before_us, end_us, load, True) == pytest.approx(work_us, rel=1e-6, abs=1e-2)


def test_what_the_quota_stops_brings_the_slowest_behind_as_on_a_lane_that_never_waits() -> None:
    budget = Budget(Processor(100.0, 0.5, 0.8, skew=0.1))
    budget.run(0.0, 1000.0, 0.0, True)
    assert budget.behind_us() == pytest.approx(100.0)
    assert budget.behind_us() == 0.0, "it was gathered"
    budget.run(1000.0, 1050.0, 0.0, True)
    assert budget.behind_us() == 0.0, "a period's first half"
    budget.run(1050.0, 2000.0, 0.0, False)
    budget.run(2000.0, 2040.0, 1.0, True)
    assert budget.behind_us() == 0.0, "it has waited"
    # However much transfers take besides, no more than all of it.
    budget.run(2040.0, 3040.0, 0.9, True)
    assert budget.behind_us() == pytest.approx(100.0)
    shared = Budget(Processor(100.0, 0.5, 0.5, skew=0.1))
    shared.run(0.0, 30.0, 0.0, True)
    assert shared.behind_us() == pytest.approx(3.0), "no faster for having waited"


def test_transfers_that_take_all_leave_what_was_there() -> None:
    quota = Processor(100.0, 0.5)
    assert Budget(quota).end(0.0, 1e6, 1.0) is None
    # 50 us of a processor, of which the lane and transfers have half each while they last.
    assert Budget(quota).end(0.0, 40.0, 1.0) == pytest.approx(40.0)
