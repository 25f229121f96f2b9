"""Zero bubble for given times: the paper's table, its memory, and what a limit costs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import UsageError
from stretto.ir.action import Action, Phase, Schedule
from stretto.schedule.families import make_schedule
from stretto.schedule.timing import PhaseTimes, peak_live, time_schedule
from stretto.verify import schedule_faults

TABLE = list(csv.DictReader((Path(__file__).parent / "data" / "zero_bubble_table5.csv").open()))
"""Zero Bubble Pipeline Parallelism, Tables 9 and 5."""

SHARE = {"1.5B": 32 / (34 + 5 * 24 * 1024 / 2304)}
"""What a microbatch keeps for W alone, of what it saved: 32 s h of s h (34 + 5 a s / h) bytes, with the
paper's sequences of 1,024 tokens; the model of 1.5 billion parameters has 24 heads and hidden size 2304."""
SHARE_OF_OTHERS = 32 / (34 + 5 * 1024 / 128)
"""The others have heads of 128."""


def most_memory(schedule: Schedule, rank: int, share: float) -> float:
    """The most microbatches of a rank, of which those that wait for W alone count a share."""
    held = most = 0.0
    for action in schedule.actions(rank):
        held += {Phase.F: 1.0, Phase.I: share - 1.0, Phase.W: -share}[action.phase]
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row['model']}-{row['microbatches']}",
            marks=[pytest.mark.slow] if int(row["stages"]) > 8 else [],
        )
        for row in TABLE
    ],
)
def test_the_table_of_the_paper_is_reached(row: dict[str, str]) -> None:
    stages, microbatches = int(row["stages"]), int(row["microbatches"])
    f, i, w, message = (float(row[key]) for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms"))
    times, share = PhaseTimes(f, i, w, message), SHARE.get(row["model"], SHARE_OF_OTHERS)
    twice = make_schedule("zb-timed", stages, microbatches, times=times, weight_share=share)
    assert round(time_schedule(twice, times).bubble_rate, 4) <= float(row["zb-2p"])
    assert all(most_memory(twice, rank, share) <= 2 * stages + 1e-6 for rank in range(stages))
    # With 1F1B's memory, every microbatch counted whole until its W is done.
    once = make_schedule("zb-h1", stages, microbatches)
    assert max(peak_live(once)) <= stages
    assert round(time_schedule(once, times).bubble_rate, 4) <= float(row["zb-1p"])
    half = PhaseTimes(f / 2, i / 2, w / 2, message)  # of each of a rank's two stages
    folded = time_schedule(make_schedule("zb-v", stages, microbatches), half)
    assert folded.bubble_rate <= 0.5 * float(row["zb-1p"])


@given(st.integers(1, 6), st.integers(1, 13), st.none() | st.integers(1, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_legal_and_keeps_its_memory(ranks, microbatches, max_live, data):
    times = PhaseTimes(*(data.draw(st.floats(0.1, 10)) for _ in range(3)), data.draw(st.floats(0, 5)))
    share = data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    schedule = make_schedule(
        "zb-timed", ranks, microbatches, max_live=max_live, times=times, weight_share=share
    )
    assert schedule_faults(schedule) == []
    for stage in range(ranks):
        for phase in (Phase.F, Phase.I, Phase.W):
            done = [a for a in schedule.actions(stage) if a.phase is phase]
            assert done == [Action(stage, phase, k) for k in range(microbatches)]
        assert most_memory(schedule, stage, share) <= (max_live or 2 * ranks) + 1e-6


def test_stages_may_have_times_of_their_own() -> None:
    times = PhaseTimes((1.0, 2.0, 1.0), (1.0, 2.0, 1.5), (0.5, 1.0, 0.5), 0.25)
    schedule = make_schedule("zb-timed", 3, 12, times=times)
    assert time_schedule(schedule, times).cost < time_schedule(make_schedule("zb-h1", 3, 12), times).cost


def test_refusals() -> None:
    with pytest.raises(
        UsageError, match=r"weight_share = 0\.5 must be from 0 to 1, with zb-timed; drop it else"
    ):
        make_schedule("1f1b", 2, 2, weight_share=0.5)
    with pytest.raises(UsageError, match=r"weight_share = 1\.5 must be"):
        make_schedule("zb-timed", 2, 2, weight_share=1.5)
    with pytest.raises(UsageError, match="F has times for 2 stages, but the schedule has 3"):
        make_schedule("zb-timed", 3, 2, times=PhaseTimes((1.0, 2.0), 1.0, 1.0))
