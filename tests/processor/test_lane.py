"""The compute lane under a quota: at full speed until the time of the period is spent, then stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.ir.costs import NO_LINK, Costs, Processor
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.processor.control_groups import own_share, processor_quota
from stretto.simulating.cards import Clock
from stretto.simulating.compute_lane import ComputeLane
from tests.simulating.test_engine import schedule
from tests.synthetic_comm import make_comm_plan

HALF = Processor(100.0, 0.5)


def lane_on(clock: Clock, processor: Processor | None) -> ComputeLane:
    return ComputeLane(clock, Costs({}, {}, NO_LINK, 0.0, "made up", processor=processor))


def ends(processor: Processor | None, *steps: float | tuple[float, float]) -> list[float]:
    """When each piece of work ends. steps: work, or (0 for rest, microseconds of it)."""
    clock = Clock()
    lane = lane_on(clock, processor)
    found: list[float] = []

    def go(left: tuple[float | tuple[float, float], ...]) -> None:
        if not left:
            return
        first, *rest = left
        then: Callable[[], None] = lambda: go(tuple(rest))  # noqa: E731
        if isinstance(first, tuple):
            clock.at(clock.now_us + first[1], then)
            return
        lane.work(first, lambda: (found.append(clock.now_us), then()))  # type: ignore[func-returns-value]

    go(steps)
    clock.run()
    return found


def test_a_lane_that_never_stands_takes_what_its_work_takes() -> None:
    # 100 us of work are 50 us at full speed; then the period's time is spent, and it is stopped as long.
    assert ends(HALF, 100.0) == [50.0]
    assert ends(HALF, 110.0) == [105.0]
    assert ends(HALF, *[10.0] * 100)[-1] == 950.0
    assert ends(HALF, 1000.0) == [950.0]
    assert ends(None, *[10.0] * 100)[-1] == 1000.0


def test_a_lane_that_stood_has_time_left() -> None:
    # 40 us of work in every 60: it never runs out of time, and computes twice as fast.
    assert ends(HALF, *(step for _ in range(5) for step in (40.0, (0.0, 40.0)))) == [
        20.0,
        80.0,
        140.0,
        200.0,
        260.0,
    ]
    assert ends(HALF, (0.0, 1000.0), 200.0) == [1150.0]


@settings(max_examples=200, deadline=None)
@given(
    st.floats(10, 500),
    st.floats(0.1, 0.9),
    st.floats(0.0, 1.0),
    st.lists(st.tuples(st.floats(0.1, 300), st.floats(0, 300), st.floats(0, 0.9)), min_size=1, max_size=8),
)
def test_no_stretch_holds_more_than_its_time_and_two_periods(
    period_us: float, share: float, faster: float, steps: list[tuple[float, float, float]]
) -> None:
    """What `bounds.step` builds on; and no work takes longer than at its share, but for two periods."""
    clock = Clock()
    lane = lane_on(clock, Processor(period_us, share, min(1.0, share + faster * (1.0 - share))))
    done: list[tuple[float, float]] = []

    def go(at: int) -> None:
        if at == len(steps):
            return
        work_us, rest_us, load = steps[at]
        begin_us = clock.now_us
        lane.change_load(0.0, load)

        def end() -> None:
            lane.change_load(load, 0.0)
            done.append((begin_us, clock.now_us))
            clock.at(clock.now_us + rest_us, lambda: go(at + 1))

        lane.work(work_us, end)

    go(0)
    clock.run()
    works = [work_us for work_us, _, _ in steps]
    ahead_us = 2 * (1 - share) * period_us + 1e-6
    for first, (begin_us, _) in enumerate(done):
        for last in range(first, len(done)):
            assert sum(works[first : last + 1]) <= done[last][1] - begin_us + ahead_us
    for (begin_us, end_us), (work_us, _, load) in zip(done, steps, strict=True):
        assert end_us - begin_us <= work_us / (1 - load) + 2 * period_us / (1 - load)


def test_a_core_that_others_use_makes_what_is_left_slower() -> None:
    def took(quota: Processor, rest_us: float) -> float:
        clock = Clock()
        lane = lane_on(clock, quota)
        done: list[float] = []
        clock.at(rest_us, lambda: lane.work(60.0, lambda: done.append(clock.now_us - rest_us)))
        clock.run()
        return done[0]

    # Half of 100 us: 60 us of work is 30 us of a processor.
    assert took(Processor(100.0, 0.5), 20.0) == pytest.approx(30.0)
    assert took(Processor(100.0, 0.5, 0.75), 20.0) == pytest.approx(40.0)
    assert took(Processor(100.0, 0.5, 0.5), 20.0) == pytest.approx(60.0), "as it was timed"


def test_a_quota_is_read_where_the_kernel_tells_it(tmp_path: Path) -> None:
    proc, mounts = tmp_path / "proc", tmp_path / "mounts"
    (proc / "self").mkdir(parents=True)
    group = mounts / "job"
    group.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/job\n")
    assert processor_quota(proc, mounts) is None, "no quota is set"
    assert own_share(1, proc, mounts) == 1.0
    (group / "cpu.max").write_text("5000 10000\n")
    assert processor_quota(proc, mounts) == (10_000.0, 5_000.0)
    (mounts / "cpu.max").write_text("2000 10000\n")
    assert processor_quota(proc, mounts) == (10_000.0, 2_000.0), "what has the group is tighter"
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert processor_quota(proc, mounts) == (10_000.0, 2_000.0), "a container sees its own group as the top"
    (mounts / "cpu.max").write_text("max 100000\n")
    assert processor_quota(proc, mounts) is None
    (proc / "self" / "cgroup").write_text("2:cpu:/old\n0::/job\n")
    old = mounts / "cpu" / "old"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("-1\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    assert processor_quota(proc, mounts) is None
    (old / "cpu.cfs_quota_us").write_text("150000\n")
    assert processor_quota(proc, mounts) == (100_000.0, 150_000.0)
    assert [own_share(threads, proc, mounts) for threads in (1, 2)] == [1.0, 0.75]


def test_costs_keep_their_quota() -> None:
    plan = make_comm_plan(schedule("0F0 0B0"))
    for quota in (None, HALF):
        plan = replace(plan, costs=replace(plan.costs, skew=0.25, processor=quota))
        assert plan_from_text(plan_to_text(plan)).costs == plan.costs
    wrong = plan_to_text(plan).replace('"share": 0.5', '"share": 1.0')
    with pytest.raises(UsageError, match=r"costs\.processor: a quota has .* a share above 0 and below 1"):
        plan_from_text(wrong)
