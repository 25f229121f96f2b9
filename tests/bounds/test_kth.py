"""Heads and tails of the k-th microbatch by hand, and what they let a machine have done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stretto.bounds.kth import Turns, find_turns
from stretto.bounds.machine import TURNS, Held, Work, one_machine
from stretto.bounds.reach import Reach, find_reach
from stretto.bounds.step import lower_bound
from stretto.ir.costs import Costs
from stretto.ir.program import Job
from stretto.schedule.families import make_schedule
from stretto.simulating import simulate
from tests.synthetic import ACTIVATION, make_costs, make_job
from tests.synthetic_comm import make_comm_costs, make_comm_job, plan_with

NBYTES = ACTIVATION.nbytes
K = np.arange(1.0, 5.0)


def turns_of(job: Job, costs: Costs) -> tuple[Reach, Turns, int, int]:
    """(…, the edge of the forward from stage 0 to 1, that of the backward from 1 to 0)."""
    stages = tuple(range(len(job.stages)))
    reach = find_reach(job, stages, costs)
    there = next(e.index for e in job.edges if (e.source, e.target) == (0, 1))
    back = next(e.index for e in job.edges if (e.source, e.target) == (1, 0))
    return reach, find_turns(job, stages, costs, reach), there, back


def test_messages_come_as_fast_as_their_sender_computes() -> None:
    job = make_job(2, 4)
    costs = make_costs(job, f_us=100, i_us=100, w_us=100, latency_us=5, bytes_per_us=NBYTES / 15)
    _, turns, there, back = turns_of(job, costs)
    assert turns.leaves_us[there] == pytest.approx(100 * K)
    assert turns.arrives_us[there] == pytest.approx(100 * K + 20)
    # F and I of each, after the first has arrived.
    assert turns.leaves_us[back] == pytest.approx(120 + 200 * K)
    # Of those that come back last: I and W of stage 0 for each.
    assert turns.follows_us[back] == pytest.approx(200 * K)
    assert turns.rests_us[back] == pytest.approx(20 + 200 * K)
    # F and I of each, a message, I and W; or all three of each, if that is longer.
    assert turns.follows_us[there] == pytest.approx(np.maximum(220 + 200 * K, 300 * K))


def test_messages_come_as_fast_as_the_link_carries_them() -> None:
    job = make_job(3, 4)
    costs = make_costs(job, latency_us=7, bytes_per_us=NBYTES / 1000)
    _, turns, there, back = turns_of(job, costs)
    f_us = float(turns.leaves_us[there][0])
    assert turns.arrives_us[there] == pytest.approx(f_us + 1000 * K + 7)
    # The second stage's messages follow as they come.
    onward = next(e.index for e in job.edges if (e.source, e.target) == (1, 2))
    assert turns.leaves_us[onward] == pytest.approx(turns.arrives_us[there] + f_us)
    assert turns.rests_us[back] == pytest.approx(1000 * K + 7 + turns.follows_us[back][0])


def test_collectives_on_the_card_hold_messages_up() -> None:
    job = make_comm_job(2, 4, blocks=2)
    costs = make_comm_costs(job, op_us=10, collective_us=1000, latency_us=7, bytes_per_us=NBYTES / 500)
    reach, turns, there, _ = turns_of(job, costs)
    # fm, a collective, fy, fm, a collective, fy, y0. The lane carries two for each, behind one op and before
    # two; only the first microbatch has two ops between.
    assert turns.leaves_us[there] == pytest.approx(np.maximum(2000 * K + 30, reach.leaves_us[there]))
    assert turns.arrives_us[there] == pytest.approx(turns.leaves_us[there] + 507)
    # On the card a microbatch's message comes to its collectives.
    _, shared, _, _ = turns_of(job, replace(costs, shared=("tp",)))
    assert shared.leaves_us[there] == pytest.approx(turns.leaves_us[there])
    assert shared.arrives_us[there] == pytest.approx(np.maximum(2500 * K + 17, turns.arrives_us[there]))


def test_the_first_of_all_is_what_reach_says() -> None:
    job = make_comm_job(4, 5, blocks=2)
    costs = make_comm_costs(job, op_us=30, collective_us=70)
    stages = tuple(range(4))
    reach = find_reach(job, stages, costs)
    turns = find_turns(job, stages, costs, reach)
    for edge in job.edges:
        assert turns.leaves_us[edge.index][0] == pytest.approx(reach.leaves_us[edge.index])
        assert turns.follows_us[edge.index][0] == pytest.approx(reach.follows_us[edge.index])
    for stage in reach.stages:
        for kth, first in ((turns.heads_us(stage), stage.head_us), (turns.tails_us(stage), stage.tail_us)):
            if kth is not None:
                assert kth[0] == pytest.approx(first)
                assert (np.diff(kth, axis=0) >= -1e-9).all()


def test_what_comes_later_cannot_have_been_done_by_hand() -> None:
    work = Work(turns=np.ones(4))
    work.add(10, 0, 5, kth_head=np.array([10, 40, 70, 100]))
    work.add(20, 0, 20, kth_head=np.array([20, 50, 80, 110]))
    found = one_machine(work, 4)
    assert found is not None
    # At 110 the last of the second job begins; all else may be done.
    assert found.us == pytest.approx(110 + 20)
    assert (found.head_us, found.at_first) == (110, Held(TURNS, 80))
    # The same at the end of the step.
    back = Work(turns=np.ones(4))
    back.add(0, 10, 5, kth_tail=np.array([10, 40, 70, 100]))
    back.add(0, 20, 20, kth_tail=np.array([20, 50, 80, 110]))
    ending = one_machine(back, 4)
    assert ending is not None
    assert (ending.us, ending.at_last) == (pytest.approx(130), Held(TURNS, 80))


def test_a_second_stage_stands_until_the_second_microbatch_is_there() -> None:
    """One microbatch at a time keeps compute busy half of the time; the others come slowly."""
    job = make_comm_job(2, 8, blocks=2)
    costs = make_comm_costs(job, op_us=100, collective_us=100)
    slow = {key: 200.0 for key in costs.op_us if key[0] == 0 and key[1].startswith(("fm", "fy"))}
    costs = replace(costs, op_us={**costs.op_us, **slow, (1, "dw1.0"): 2000.0})
    bound = lower_bound(job, (0, 1), costs)
    head_us = find_reach(job, (0, 1), costs).stages[1].head_us.min()
    each_us = sum(us for (stage, _), us in costs.op_us.items() if stage == 1)
    assert bound.parts["rank 1 compute"] > head_us + 8 * each_us + 100
    assert bound.binds.startswith("place 1's compute")
    assert f"which {TURNS} hold up until" in bound.binds


def test_one_turn_stands_for_several_of_many_microbatches() -> None:
    few, many = make_job(2, 4), make_job(2, 400)
    costs = make_costs(few, f_us=100, i_us=100, w_us=100, latency_us=5, bytes_per_us=NBYTES / 15)
    _, turns, there, _ = turns_of(many, costs)
    assert len(turns.k) == len(turns.count) == 32
    assert (turns.k[0], turns.k[-1], turns.count.sum()) == (1, 400, 400)
    assert turns.leaves_us[there] == pytest.approx(100 * turns.k)


def test_a_start_that_its_own_collective_slows_takes_nothing_of_what_follows() -> None:
    job = make_comm_job(1, 1)
    costs = make_comm_costs(job, op_us=1, start_us=100, collective_us=300, slowdown=0.2)
    bound = lower_bound(job, (0,), costs)
    step_us = simulate(plan_with(job, make_schedule("1f1b", 1, 1), costs)).step_us
    for name, us in bound.parts.items():
        assert us <= step_us * (1 + 1e-9), name
