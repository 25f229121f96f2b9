"""Heads and tails of windows, and the search for those that serve the whole step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stretto.ir.costs import Costs
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import Job
from stretto.ir.serialize import plan_to_text
from stretto.order import NOTHING, Arranger, Outside, list_order, make_graph, refine, replay
from stretto.planning import tries, windows
from stretto.planning.lower import captured_windows
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import make_schedule
from stretto.verifying import verify
from tests.synthetic_comm import make_comm_costs
from tests.verifying.comm_plans import comm_job


def job_of(microbatches: int = 4, blocks: int = 2) -> tuple[Job, Costs]:
    job = comm_job(2, microbatches, (("tp", 2),), blocks=blocks)
    return job, make_comm_costs(job, collective_us=100.0)


def step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


def test_a_message_with_a_tail_goes_earlier_and_one_that_arrives_late_is_used_later() -> None:
    job, costs = job_of()
    schedule = make_schedule("1f1b", 2, 4)
    window = captured_windows(job, schedule)["1B"]
    (send,) = (item for item in window.items if item.kind is ItemKind.SEND)

    def sent_us(tail_us: float) -> float:
        outside = Outside(tails={(send.part, int(send.ref)): tail_us})
        graph = make_graph(job, costs, window, schedule.stage_ranks).seen(outside)
        played = replay(graph, list_order(graph))
        return played.late_us - tail_us

    plain = make_graph(job, costs, window, schedule.stage_ranks)
    length_us = replay(plain, list_order(plain)).end_us
    # As soon as its value is there, which needs all of I, and nothing of W.
    soonest_us = sent_us(10 * length_us)
    assert 0.0 < soonest_us < length_us
    assert replay(plain, list_order(plain)).late_us == length_us, (
        "without a tail only the window's end counts"
    )

    window = captured_windows(job, schedule)["1F"]
    (wait,) = (item for item in window.items if item.kind is ItemKind.WAIT)
    late = make_graph(job, costs, window, schedule.stage_ranks).seen(
        Outside({(wait.part, int(wait.ref)): 500.0})
    )
    soon = make_graph(job, costs, window, schedule.stage_ranks)
    ends = [replay(graph, list_order(graph)).end_us for graph in (soon, late)]
    assert ends[1] == pytest.approx(ends[0] + 500.0)
    assert late.key() != soon.key()


def test_the_search_gains_is_proved_and_gives_equal_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    job = comm_job(2, 6, (("tp", 2),), blocks=3)
    costs = make_comm_costs(job, collective_us=150.0, latency_us=50.0, shared=("tp",))
    draw = random.Random(0)
    costs = replace(costs, op_us={op: us * draw.uniform(0.3, 1.7) for op, us in costs.op_us.items()})
    # One window a rank is better than any pairs here.
    monkeypatch.setattr(windows, "order_together", lambda *_: None)
    plan = make_plan(job, costs, schedule="1f1b", overlap="window")
    verify(plan)
    assert plan_to_text(plan) == plan_to_text(make_plan(job, costs, schedule="1f1b", overlap="window"))
    with monkeypatch.context() as patch:
        patch.setattr(tries, "PROMISING", 0)
        without = make_plan(job, costs, schedule="1f1b", overlap="window")
    assert step_us(plan) < 0.99 * step_us(without)
    # What gains less than is asked of it is not taken.
    monkeypatch.setattr(tries, "REFINED", 0.9 * step_us(plan) / step_us(without))
    assert step_us(make_plan(job, costs, schedule="1f1b", overlap="window")) == step_us(without)


def test_no_search_without_messages_or_where_steps_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(job: Job, costs: Costs) -> refine.Refined | None:
        schedule = make_schedule("1f1b", len(job.stages), job.microbatches)
        quick = Arranger(job, costs, schedule.stage_ranks, rounds=4)
        plan = make_plan(job, costs, schedule=schedule, overlap="local")
        captured = captured_windows(job, schedule)
        return refine.refine(
            lambda windows: replace(plan, windows={**plan.windows, **windows}), captured, quick
        )

    job, costs = job_of()
    found = searched(job, costs)
    assert found is not None
    assert found.windows.keys() == captured_windows(job, make_schedule("1f1b", 2, 4)).keys()
    alone = comm_job(1, 4, (("tp", 2),))
    assert searched(alone, make_comm_costs(alone)) is None
    monkeypatch.setattr(refine, "WORK", 100)
    assert searched(job, costs) is None


def test_what_is_not_known_of_other_ranks_changes_nothing() -> None:
    job, costs = job_of()
    schedule = make_schedule("1f1b", 2, 4)
    arranger = Arranger(job, costs, schedule.stage_ranks, "list")
    for window in captured_windows(job, schedule).values():
        assert arranger.arrange(window) == arranger.arrange(window, NOTHING)
        graph = arranger.graph(window)
        played = replay(graph, list_order(graph))
        assert played.late_us == played.end_us
