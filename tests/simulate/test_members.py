"""Ranks whose speeds go up and down: each by itself, against the others, and what a step loses to it."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from importlib import import_module

import pytest

from stretto.ir.costs import Costs, Link, Quota, Unsteady
from stretto.ir.plan import Plan
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.ir.timeline import COMPUTE_LANE, SpanKind, Timeline
from stretto.simulate import one_step, predict, simulate
from stretto.simulate.engine import Walk
from stretto.simulate.members import Members, Spells
from stretto.simulate.typical import STEPS
from tests.simulate.test_engine import schedule
from tests.synthetic_comm import make_comm_plan


class Speeds(Spells):
    """Deviations that are told: (until when, what)."""

    def __init__(self, *told: tuple[float, float]) -> None:
        super().__init__(0.0, 1.0, random.Random(0))
        self._ends_us = [until_us for until_us, _ in told]
        self._values = [value for _, value in told]


EVEN = (float("inf"), 0.0)


def members(
    *own: Spells,
    quota: Quota | None = None,
    shared: Spells | None = None,
    axes: tuple[tuple[str, int], ...] = (),
) -> Members:
    costs = Costs({}, {}, Link(0.0, 1.0), 0.0, "told", quota=quota)
    axes = axes or (("tp", len(own)),)
    made = Members(axes, costs, 0.0, 1.0, shared or Speeds(EVEN), random.Random(0))
    made._own = list(own)
    return made


def test_work_takes_a_rank_what_its_speeds_leave() -> None:
    one = members(Speeds((100.0, 0.25), (200.0, -0.5), EVEN))
    assert one.work(0.0, 50.0) == pytest.approx(40)
    assert one.work(40.0, 75.0) == pytest.approx(60)
    # 25 of the 60 up to 150, where it is half as fast; 50 of the next 50, 35 are left at the mean speed.
    assert one.work(150.0, 60.0) == pytest.approx(50 + 35)
    assert one.behind == (0.0,)


def test_what_all_ranks_have_together_adds_to_their_own() -> None:
    both = members(Speeds((float("inf"), 0.25)), shared=Speeds((float("inf"), 0.25)))
    assert both.work(0.0, 150.0) == pytest.approx(100)
    stopped = members(Speeds((float("inf"), -2.0)))
    assert stopped.work(0.0, 10.0) == pytest.approx(40), "no rank is slower than a quarter of its speed"


def test_ranks_come_apart_and_meet() -> None:
    slow, fast = Speeds((float("inf"), -0.5)), Speeds((float("inf"), 1.0))
    ranks = members(Speeds(EVEN), slow, fast)
    assert ranks.work(0.0, 100.0) == pytest.approx(100)
    assert ranks.behind == pytest.approx((0, 100, -50))
    assert ranks.last() == pytest.approx((100, 100, 100))
    # The first stood from 100 to 130. The third was there before, and the second comes at 200.
    ranks.meet(100.0, 130.0)
    assert ranks.behind == pytest.approx((0, 70, 0))
    # At 140, for a message that each has from its peer, the second peer's 100 later: at 240.
    ranks.meet(140.0, 140.0, (0.0, 100.0, 5.0))
    assert ranks.behind == pytest.approx((0, 100, 5))
    ranks.meet(150.0, 300.0)
    assert ranks.behind == (0, 0, 0)


def test_a_collective_is_between_ranks_that_differ_in_its_axes_only() -> None:
    speeds = [Speeds((float("inf"), 1.0 / (1.0 + late) - 1.0)) for late in (0.0, 0.2, 0.5, 0.3)]
    ranks = members(*speeds, axes=(("dp", 2), ("tp", 2)))
    ranks.work(0.0, 100.0)
    assert ranks.behind == pytest.approx((0, 20, 50, 30))
    assert ranks.last(("tp",)) == pytest.approx((20, 20, 50, 50))
    assert ranks.last(("dp",)) == pytest.approx((50, 30, 50, 30))
    assert ranks.last() == ranks.last(("dp", "tp")) == pytest.approx((50, 50, 50, 50))


@pytest.mark.parametrize("draw", [0, 1])
def test_a_rank_that_is_always_slower_is_waited_for_in_every_step(draw: int) -> None:
    for collective_us in (50.0, 150.0, 1500.0):
        even, uneven = balanced(collective_us, None), balanced(collective_us, Unsteady(0.0, 100.0))
        even, uneven = (replace(one, costs=replace(one.costs, skew=0.1)) for one in (even, uneven))
        found_us = one_step(uneven, draw).step_us
        assert found_us == pytest.approx(one_step(even).step_us, rel=0.02)


def test_what_speeds_bring_is_not_counted_as_lasting() -> None:
    costs = Costs({}, {}, Link(0.0, 1.0), 0.0, "told", skew=0.05)
    for spread, lasting in ((0.1, 0.0), (0.0, 0.05), (-0.05, 0.05 - 0.05 * 0.5895)):
        made = Members((("tp", 2),), costs, spread, 1.0, Speeds(EVEN), random.Random(0))
        means = sorted(own._mean for own in made._own)
        assert means == pytest.approx([-lasting, lasting], abs=1e-5)


def test_a_quota_stops_ranks_apart_by_whole_stops() -> None:
    quota = Quota(100.0, 0.5, 0.8, skew=0.1)  # Of 100, 62.5 are for what 0.8 of a processor does in all.
    several = members(Speeds(EVEN), Speeds(EVEN), quota=quota)
    apart = []
    for _ in range(4000):
        several.meet(0.0, 1000.0)
        several.stop(10.0)
        apart.append(several.behind[1])
    assert set(map(round, map(abs, apart))) >= {0, 38}
    assert min(map(abs, filter(None, apart))) == pytest.approx(37.5)
    # The slowest is later than the mean of both by half of what they are apart.
    assert statistics.fmean(map(abs, apart)) / 2 == pytest.approx(0.1 * 10.0, rel=0.1)
    assert statistics.fmean(apart) == pytest.approx(0, abs=0.4)
    for unmoved in (members(Speeds(EVEN), quota=quota), members(Speeds(EVEN), Speeds(EVEN))):
        unmoved.stop(1e6)
        assert set(unmoved.behind) == {0.0}
    # What shares its cores so that a quota never stops it has none of that.
    shared = members(Speeds(EVEN), Speeds(EVEN), quota=Quota(100.0, 0.5, 0.5, skew=0.1))
    shared.stop(1e6)
    assert shared.behind == (0.0, 0.0)


def test_spells_have_their_spread_and_their_length() -> None:
    spells = Spells(0.2, 50.0, random.Random(1))
    ends, values, now = [], [], 0.0
    while len(ends) < 4000:
        value, until = spells.at(now)
        assert spells.at((now + until) / 2) == (value, until)
        ends.append(until - now)
        values.append(value)
        now = until
    assert statistics.fmean(ends) == pytest.approx(50, rel=0.06)
    assert statistics.fmean(values) == pytest.approx(0, abs=0.01)
    assert statistics.pstdev(values) == pytest.approx(0.2, rel=0.05)
    mirror = Spells(-0.2, 50.0, random.Random(1))
    assert mirror.at(now) == (-spells.at(now)[0], spells.at(now)[1])


def balanced(collective_us: float, unsteady: Unsteady | None) -> Plan:
    """Two microbatches at a time: of one the ops run while the other is summed."""
    plan = make_comm_plan(
        schedule("0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B (0F3;0B2)OVERLAP_F_B 0B3"),
        op_us=100,
        collective_us=collective_us,
        blocks=4,
    )
    return replace(plan, costs=replace(plan.costs, unsteady=unsteady))


def test_a_step_loses_most_where_nothing_has_slack() -> None:
    unsteady = Unsteady(0.2, 300.0)

    def lost(collective_us: float) -> float:
        steady_us = simulate(balanced(collective_us, None)).step_us
        return simulate(balanced(collective_us, unsteady)).step_us / steady_us - 1.0

    assert lost(150.0) > 0.02
    assert lost(1500.0) < 0.5 * lost(150.0)
    alone = balanced(0.0, Unsteady(0.2, 300.0))
    alone = replace(alone, job=replace(alone.job, axes=()))
    assert simulate(alone).step_us == pytest.approx(one_step(alone).step_us, rel=0.01), "the mean stays"


def test_a_simulate_is_the_same_every_time_and_as_the_plan_says() -> None:
    plan = balanced(150.0, Unsteady(0.2, 300.0, 0.5))
    first, again = simulate(plan), simulate(plan_from_text(plan_to_text(plan)))
    assert first == again
    assert predict(plan).step_us == first.step_us
    found = [one_step(plan, draw).step_us for draw in range(STEPS)]
    assert first.step_us in found
    assert first.step_us == pytest.approx(statistics.fmean(found), rel=0.02)
    assert len(set(found)) == STEPS


def test_ranks_at_one_speed_take_a_step_as_ranks_that_are_not_told_apart() -> None:
    for collective_us in (50.0, 150.0, 1500.0):
        even, plan = balanced(collective_us, None), balanced(collective_us, Unsteady(0.0, 100.0))
        assert simulate(plan).step_us == pytest.approx(simulate(even).step_us)
        assert simulate(even) == one_step(even)
        unsteady = simulate(replace(plan, costs=replace(plan.costs, unsteady=Unsteady(0.2, 100.0))))
        assert unsteady.peak_bytes == simulate(even).peak_bytes
        spans = [span for span in unsteady.spans if span.kind is SpanKind.MESSAGE]
        assert len(spans) == len([span for span in simulate(even).spans if span.kind is SpanKind.MESSAGE])


@pytest.mark.parametrize("quota", [None, Quota(100.0, 0.5, 0.8, skew=0.5)])
def test_a_lane_keeps_the_order_of_starts_and_accounts_add_up(quota: Quota | None) -> None:
    plan = balanced(60.0, Unsteady(0.3, 120.0))
    plan = replace(plan, costs=replace(plan.costs, quota=quota))

    def order(timeline: Timeline) -> list[tuple[str, int | None]]:
        spans = [s for s in timeline.spans if s.lane == "tp" and s.kind is SpanKind.MESSAGE]
        return [(s.name, s.microbatch) for s in sorted(spans, key=lambda s: s.start_us)]

    told = order(one_step(plan))
    for draw in range(12):
        timeline = one_step(plan, draw)
        assert order(timeline) == told
        lane = [s.duration_us for s in timeline.spans if s.lane == COMPUTE_LANE]
        assert sum(lane) == pytest.approx(timeline.step_us)


def test_what_is_started_later_is_not_carried_sooner() -> None:
    plan = balanced(60.0, None)
    walk = Walk(plan)
    call = next(s.call for s in walk.window("0F").segments if s.call is not None)
    late = walk.collectives.start(call, 0, 0, (50.0, 60.0))
    soon = walk.collectives.start(call, 0, 1)
    walk.clock.run()
    assert late.behind == (0.0, 10.0)
    assert (late.done_us, soon.done_us) == (pytest.approx(110), pytest.approx(170))


def test_what_is_common_brings_no_rank_behind() -> None:
    together = one_step(balanced(150.0, Unsteady(0.2, 300.0, 1.0)), 4)
    assert together.step_us != simulate(balanced(150.0, None)).step_us

    def mean_us(common: float) -> float:
        plan = balanced(150.0, Unsteady(0.2, 300.0, common))
        return statistics.fmean(one_step(plan, draw).step_us for draw in range(40))

    assert mean_us(1.0) < mean_us(0.0)


def test_long_steps_are_simulated_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = balanced(150.0, Unsteady(0.2, 300.0))
    draws: list[int] = []

    def counted(plan: Plan, draw: int) -> Timeline:
        draws.append(draw)
        return one_step(plan, draw)

    typical = import_module("stretto.simulate.typical")
    monkeypatch.setattr(typical, "one_step", counted)
    simulate(plan)
    assert draws == list(range(STEPS))
    draws.clear()
    monkeypatch.setattr(typical, "MOST_OPS", 1)
    simulate(plan)
    assert draws == [0, 1], "never fewer than a pair"


@pytest.mark.parametrize(
    ("spread", "spell_us", "common"),
    [(-0.1, 1.0, 0.0), (0.1, 0.0, 0.0), (0.1, 1e-9, 0.0), (0.1, float("inf"), 0.0), (0.1, 1.0, 1.1)],
)
def test_what_cannot_be_is_refused(spread: float, spell_us: float, common: float) -> None:
    with pytest.raises(ValueError, match="unsteady has a spread and a common part from 0 to 1, and a spell"):
        Unsteady(spread, spell_us, common)
