"""Families with one stage a rank, over a grid of sizes: complete, in order, no deadlock, within memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.schedule.family import Wanted
from stretto.schedule.one_stage import ONE_STAGE
from stretto.schedule.timing import PhaseTimes, time_schedule

SPLIT = ("eager-1f1b-split", "zb-h1", "zb-h2")
LIVE = {
    "gpipe": lambda n, i: 10**9,
    "1f1b": lambda n, i: n - i,
    "eager-1f1b": lambda n, i: 2 * (n - i) - 1,
    "eager-1f1b-split": lambda n, i: 2 * (n - i) - 1,
    "zb-h1": lambda n, i: n,
    "zb-h2": lambda n, i: 2 * n - 1,
}

families = st.sampled_from([family.name for family in ONE_STAGE])
stage_counts = st.integers(1, 6)
microbatch_counts = st.integers(1, 12)
durations = st.floats(0.1, 10, allow_nan=False)


def check_legal(schedule: Schedule, split: bool) -> None:
    """Every action once, microbatches ascending within a phase, and no action before what it needs."""
    assert schedule.stage_ranks == tuple(range(schedule.stages))
    phases = (Phase.F, Phase.I, Phase.W) if split else (Phase.F, Phase.B)
    for stage in range(schedule.stages):
        order = list(schedule.actions(stage))
        for phase in phases:
            assert [a for a in order if a.phase is phase] == [
                Action(stage, phase, k) for k in range(schedule.microbatches)
            ]
        assert len(order) == len(phases) * schedule.microbatches
        place = {(a.phase, a.microbatch): index for index, a in enumerate(order)}
        for k in range(schedule.microbatches):
            steps = [place[phase, k] for phase in phases]
            assert steps == sorted(steps)


@given(families, stage_counts, microbatch_counts, durations, durations, durations, st.floats(0, 5))
@settings(max_examples=150, deadline=None)
def test_every_family_is_complete_ordered_and_progresses(family, stages, microbatches, f, i, w, message):
    schedule = make_schedule(family, stages, microbatches)
    assert (schedule.family, schedule.stages, schedule.microbatches) == (family, stages, microbatches)
    check_legal(schedule, family in SPLIT)
    timing = time_schedule(schedule, PhaseTimes(f, i, w, message))
    # No schedule beats the way of one microbatch through all stages and back, nor one stage's own work.
    assert timing.makespan >= stages * (f + i) + 2 * (stages - 1) * message + w - 1e-6
    assert timing.makespan >= microbatches * (f + i + w) - 1e-6
    assert timing.peak_live == tuple(
        min(microbatches, LIVE[family](stages, stage)) for stage in range(stages)
    )


@given(families, stage_counts, microbatch_counts, st.integers(1, 14), st.data())
@settings(max_examples=150, deadline=None)
def test_a_memory_limit_is_kept_or_refused(family, stages, microbatches, max_live, data):
    least = FAMILIES[family].min_live(Wanted(stages, 1, microbatches))
    if max_live < least:
        with pytest.raises(UsageError, match=rf"cannot keep max_live={max_live} .* its minimum is {least}\."):
            make_schedule(family, stages, microbatches, max_live=max_live)
        return
    schedule = make_schedule(family, stages, microbatches, max_live=max_live)
    check_legal(schedule, family in SPLIT)
    times = PhaseTimes(*(data.draw(durations) for _ in range(3)), data.draw(st.floats(0, 5)))
    timing = time_schedule(schedule, times)
    free = make_schedule(family, stages, microbatches)
    unlimited = time_schedule(free, times).peak_live
    assert timing.peak_live == tuple(min(max_live, live) for live in unlimited)
    if max_live >= max(unlimited):
        assert schedule == free


def test_the_orders_are_those_of_the_sources():
    def tokens(family: str, stage: int) -> str:
        return " ".join(str(a)[1:] for a in make_schedule(family, 3, 5).actions(stage))

    assert tokens("gpipe", 1) == "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"
    assert tokens("1f1b", 0) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert tokens("1f1b", 2) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert tokens("eager-1f1b", 0) == "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"
    assert tokens("eager-1f1b", 1) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert tokens("zb-h1", 0) == "F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4"
    assert tokens("zb-h1", 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4"
    assert tokens("zb-h2", 1) == "F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4"


def test_memory_is_traded_for_time():
    """Among 1F1B, H1 and H2 less bubble costs as much memory as the paper says."""
    rates = {f: time_schedule(make_schedule(f, 4, 16)).bubble_rate for f in ("1f1b", "zb-h1", "zb-h2")}
    # (n-1)(F+I+W) = 9, (n-1)(F+I-W) = 3 and (n-1)(F+I-2W) = 0 beside m(F+I+W) = 48.
    assert rates == pytest.approx({"1f1b": 9 / 57, "zb-h1": 3 / 51, "zb-h2": 0})
    tight = time_schedule(make_schedule("zb-h2", 4, 16, max_live=4))
    assert tight.peak_live == (4, 4, 4, 4)
    assert tight.bubble_rate > rates["zb-h2"]


def test_refusals_say_what_to_do():
    with pytest.raises(
        UsageError,
        match=r"unknown schedule family 'zb-h9'; did you mean 'zb-h.'\? choose one of: gpipe",
    ):
        make_schedule("zb-h9", 2, 2)
    with pytest.raises(UsageError, match="ranks is 0; a schedule needs at least 1"):
        make_schedule("1f1b", 0, 2)
    with pytest.raises(UsageError, match="microbatches is -1; a schedule needs at least 1"):
        make_schedule("1f1b", 2, -1)
    with pytest.raises(
        UsageError, match=r"'gpipe' cannot keep max_live=3 .* minimum is 8\. Raise max_live or"
    ):
        make_schedule("gpipe", 2, 8, max_live=3)
    with pytest.raises(UsageError, match=r"cannot keep max_live=0 .* minimum is 1\. Raise max_live$"):
        make_schedule("1f1b", 2, 8, max_live=0)
