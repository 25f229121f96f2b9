"""The clock of schedules: published figures, rules for messages and overlap, and refusals."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from stretto.errors import PlanError, UsageError
from stretto.ir.action import Action
from stretto.schedule.csv import from_csv
from stretto.schedule.families import make_schedule
from stretto.schedule.timing import PhaseTimes, parse_times, peak_live, time_schedule

# Zero Bubble Pipeline Parallelism (ICLR 2024, arXiv 2401.10241): phase and message times from Table 9, bubble
# rates from Table 5. The header's t_b is the input gradient, I here.
TABLE = list(csv.DictReader((Path(__file__).parent / "data" / "zero_bubble_table5.csv").open()))


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_published_bubble_rates_are_reproduced(row, family):
    times = PhaseTimes(*(float(row[key]) for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms")))
    timing = time_schedule(make_schedule(family, int(row["stages"]), int(row["microbatches"])), times)
    assert f"{timing.bubble_rate:.4f}" == f"{float(row[family]):.4f}"


def test_messages_delay_the_receiver_and_occupy_nobody():
    timing = time_schedule(make_schedule("gpipe", 2, 2), PhaseTimes(2.0, 3.0, 1.0, 0.5))
    starts = [
        timing.start[Action.parse(token)]
        for token in ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]
    ]
    assert starts == [0, 2, 2.5, 4.5, 6.5, 10.5, 11, 15]
    assert timing.makespan == timing.cost == 19
    assert timing.bubble_rate == pytest.approx((19 - 12) / 19)


def test_stages_on_one_rank_need_no_message():
    timing = time_schedule(from_csv("0F0,1F0,1I0,0I0,1W0,0W0\n"), PhaseTimes(1.0, 1.0, 1.0, 100.0))
    assert timing.makespan == 6
    assert timing.bubble_rate == 0


def test_stages_may_have_times_of_their_own():
    times = parse_times("F=1:4,I=1,W=2:0,message=0")
    timing = time_schedule(make_schedule("1f1b", 2, 1), times)
    assert timing.end[Action.parse("1F0")] == 5
    assert timing.end[Action.parse("1B0")] == 6
    assert timing.makespan == 9
    # The cost is the longest rank; the bubble is the mean idle share of both ranks.
    assert timing.bubble_rate == pytest.approx(1 - (4 + 5) / 2 / 9)
    with pytest.raises(UsageError, match="F has times for 2 stages, but the schedule has 3"):
        time_schedule(make_schedule("1f1b", 3, 1), times)


def test_overlapped_actions_are_one_block():
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    timing = time_schedule(schedule, PhaseTimes(2.0, 1.0, 1.0))
    for token in ("0F1", "0B0"):
        assert (timing.start[Action.parse(token)], timing.end[Action.parse(token)]) == (2, 6)
    assert timing.makespan == 8
    assert timing.peak_live == (2,)


def test_live_counts_to_the_last_backward_action():
    assert peak_live(from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")) == (2,)
    assert peak_live(from_csv("0F0,0I0,0W0,0F1,0B1\n")) == (1,)


def test_a_deadlock_names_every_stuck_rank():
    with pytest.raises(PlanError) as refused:
        time_schedule(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n"))
    assert str(refused.value).splitlines() == [
        "schedule 'csv' cannot progress: 3 faults",
        "  rank 0: 0B0 waits for 1B0, which rank 1 has not reached",
        "  rank 1: 1F1 waits for 0F1, which rank 0 has not reached",
        "  rank 2: 2F1 waits for 1F1, which rank 1 has not reached",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0\n", "rank 0: 0B0 waits for 1B0, which no rank runs"),
        ("0B0,0F0\n", "rank 0: 0B0 waits for 0F0, which rank 0 has not reached"),
        ("0F0,0W0,0I0\n", "rank 0: 0W0 waits for 0I0, which rank 0 has not reached"),
        ("(0F0;0B0)OVERLAP_F_B\n", "waits for 0F0, which rank 0 has not reached"),
        ("0F0,0F0,0B0\n", "rank 0: 0F0 is there again; each action runs once"),
    ],
)
def test_schedules_that_cannot_be_timed_are_refused(text, fault):
    with pytest.raises(PlanError) as refused:
        time_schedule(from_csv(text))
    assert fault in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F=1,I=1", "W missing"),
        ("", "cannot read ''"),
        ("F=1,I=1,W=x", "'W=x' has no number"),
        ("F=1,I=1,W=1,comm=3", "cannot read 'comm=3'"),
        ("F=1,B=2", "B is I and W together"),
        ("F=1,F=1,I=1,W=1", "F is given twice"),
        ("F=1,I=1,W=-1", "time W=-1.0 is not a time"),
        ("F=nan,I=1,W=1", "time F=nan is not a time"),
        ("F=1,I=1,W=1,message=1:x", "for each border, message=1.5:2:2"),
    ],
)
def test_times_that_cannot_be_read_are_refused(text, message):
    with pytest.raises(UsageError) as refused:
        parse_times(text)
    assert message in str(refused.value)
