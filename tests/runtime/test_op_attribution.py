"""Runs of windows that several actions share: which action's ops ran when, against cases done by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from stretto.capture.trace import trace
from stretto.ir.timeline import SpanKind
from stretto.runtime.op_attribution import Turn, Turns
from tests.capture.zoo import Chain, mean_square, rows
from tests.runtime.equality import job_of, lowered
from tests.runtime.test_timeline import measured
from tests.verify.plans import hand_schedule

ITEMS = (
    Turn(0, 30.0, False),
    Turn(0, 10.0, True),  # starts a collective
    Turn(1, 20.0, False),
    Turn(1, 0.0, False),  # a view
    Turn(0, 0.0, True),  # waits for it
    Turn(0, 5.0, False),
)


def test_time_between_two_calls_belongs_to_the_items_between_them() -> None:
    calls = [(-50.0, -40.0), (100.0, 100.0), (190.0, 260.0), (400.0, 410.0)]
    turns = Turns(ITEMS, calls, 0.0, 300.0)
    # From the start's call at 100 to the wait's at 190, 10 and 20 share 90.
    assert turns.pieces(0.0, 190.0) == [(0, 0.0, 130.0), (1, 130.0, 190.0)]
    assert turns.pieces(260.0, 300.0) == [(0, 260.0, 300.0)]
    assert turns.pieces(140.0, 150.0) == [(1, 140.0, 150.0)]
    assert turns.pieces(150.0, 150.0) == []


def test_a_run_without_calls_is_shared_by_cost() -> None:
    items = (Turn(1, 10.0, False), Turn(0, 30.0, False), Turn(1, 60.0, False))
    assert Turns(items, [], 0.0, 50.0).pieces(0.0, 50.0) == [(1, 0.0, 5.0), (0, 5.0, 20.0), (1, 20.0, 50.0)]


@pytest.mark.parametrize("calls", [[], [(100.0, 100.0)], [(100.0, 100.0), (120.0, 130.0), (190.0, 260.0)]])
def test_calls_that_do_not_fit_leave_the_run_whole(calls: list[tuple[float, float]]) -> None:
    assert Turns(ITEMS, calls, 0.0, 300.0).pieces(0.0, 300.0) == [(0, 0.0, 300.0)]


def test_a_measured_timeline_tells_actions_of_one_window_apart() -> None:
    model, batch = Chain(), rows(8)
    job = job_of(trace(model, batch, mean_square, microbatches=2), 1, 2)
    plan = lowered(job, hand_schedule((0,), 2, "0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    timeline = measured(plan, model, batch)
    spans = [span for span in timeline.spans if span.kind is SpanKind.COMPUTE]
    assert {span.name for span in spans} == {"0F0", "0F1", "0B0", "0B1"}
    assert all(span.name == f"{span.stage}{span.phase}{span.microbatch}" for span in spans)
    for before, after in pairwise(spans):
        assert before.end_us <= after.start_us
