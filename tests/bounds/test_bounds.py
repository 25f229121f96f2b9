"""Lower bounds: hand cases, words, and the property that no simulated step is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.bounds.machine import MachineWork, OtherWork, one_machine
from stretto.bounds.step import format_us, lower_bound
from stretto.errors import PlanError
from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot
from stretto.ir.costs import Link
from stretto.ir.program import Edge
from stretto.planning.lower import lower
from stretto.schedule.families import make_schedule
from stretto.simulating import predict
from tests.synthetic import ACTIVATION, make_costs, make_job

NBYTES = ACTIVATION.nbytes


def test_compute_binds_after_the_chain_of_forwards() -> None:
    job = make_job(4, 8)
    costs = make_costs(job, f_us=100, i_us=100, w_us=100, latency_us=5, bytes_per_us=NBYTES / 15)
    bound = lower_bound(job, range(4), costs)
    # Rank 3 starts after three forwards and three messages, and then has eight microbatches of 300 us.
    assert bound.us == pytest.approx(3 * 120 + 8 * 300)
    assert bound.binds == "rank 3's compute (8 x 300 us) after a head of 360 us"
    assert bound.parts["rank 3 compute"] == bound.us


def test_the_tail_counts_what_follows_the_last_input_gradient() -> None:
    job = make_job(2, 4)
    costs = make_costs(job, f_us=100, i_us=100, w_us=1, latency_us=50)
    bound = lower_bound(job, (0, 1), costs)
    # Rank 1 after 150 us: four times F and I, then a message, and I and W of stage 0.
    assert bound.parts["rank 1 compute"] == pytest.approx(150 + 4 * 200 + 50 + 101)


def test_a_slow_link_binds() -> None:
    job = make_job(2, 8)
    costs = make_costs(job, bytes_per_us=NBYTES / 1000)
    bound = lower_bound(job, (0, 1), costs)
    # After one forward eight messages of 1000 us; then F and I, a message back, and I and W.
    assert bound.us == pytest.approx(100 + 8 * 1000 + 200 + 1000 + 200)
    assert "rank 0's outgoing messages (8 x 1 ms) after a head of 100 us" in bound.binds


def test_one_microbatch_is_its_critical_path() -> None:
    job = make_job(3, 1)
    costs = make_costs(job, latency_us=10)
    bound = lower_bound(job, (0, 1, 2), costs)
    # Down, up, and the last weight gradient.
    assert bound.parts["critical path"] == pytest.approx(3 * 100 + 3 * 100 + 100 + 4 * 10)
    assert bound.us == pytest.approx(740)
    assert bound.binds == "the critical path of one microbatch (740 us)"


def test_processor_time_counts_where_it_cannot_fall_into_idle_time() -> None:
    job = make_job(2, 10)
    slow = replace(make_costs(job), default_link=Link(0, NBYTES / 100, 50 / (NBYTES / 1e6)))
    bound = lower_bound(job, (0, 1), slow)
    # Rank 0: half of the processor for 100 us, for 10 messages out and 10 in; nothing before its head.
    assert bound.parts["rank 0 compute"] == pytest.approx(10 * 300 + 20 * 50)


def test_transfers_take_nothing_before_they_can_begin_and_after_they_must_have_ended() -> None:
    """A rank whose first input comes late has no transfers of its own before that either."""
    work = MachineWork(other=(OtherWork(60.0, 0.5, head_us=90.0, tail_us=30.0), OtherWork(8.0, 0.1)))
    work.add(100.0, 50.0, 10.0)
    machine = one_machine(work, 10)
    assert machine is not None
    # Of the first 0.5 * (10 + 20) may fall outside, of the second all.
    assert machine.extra_us == pytest.approx(60.0 - 15.0)
    assert machine.us == pytest.approx(100 + 10 * 10 + 50 + 45)
    # The same transfers at any time: 0.5 * 150 may.
    work.other = (OtherWork(60.0, 0.5), OtherWork(8.0, 0.1))
    anywhere = one_machine(work, 10)
    assert anywhere is not None
    assert anywhere.us == pytest.approx(250)


def test_actions_cost_counts_once_a_microbatch() -> None:
    job = make_job(1, 4)
    costs = replace(make_costs(job), action_us=10.0)
    assert lower_bound(job, (0,), costs).us == pytest.approx(4 * 310)


def test_a_circle_of_edges_is_refused() -> None:
    job = make_job(2, 1)
    back = Edge(2, "y1", 1, Phase.F, 0, Phase.F, ACTIVATION)
    first = job.stages[0]
    h0 = replace(first.ops[Phase.F][0], args=job.stages[1].ops[Phase.F][1].args)
    h0 = replace(h0, args=(type(h0.args[0])("y1"),))
    ops = {**first.ops, Phase.F: (h0, first.ops[Phase.F][1])}
    job = replace(job, stages=(replace(first, ops=ops), job.stages[1]), edges=(*job.edges, back))
    with pytest.raises(PlanError, match="circle"):
        lower_bound(job, (0, 1), make_costs(job))


@pytest.mark.parametrize(
    ("us", "text"),
    [(0.5, "0.5 us"), (999.9, "1 ms"), (226_000, "226 ms"), (1_380_000, "1.38 s"), (4e9, "4000 s")],
)
def test_times_for_people(us: float, text: str) -> None:
    assert format_us(us) == text


# --- the property --------------------------------------------------------------------------------------


def virtual(ranks: int, chunks: int, microbatches: int) -> Schedule:
    """Stages there and back over the ranks (a V), all forwards and then all backwards."""
    stages = ranks * chunks
    path = [*range(ranks), *reversed(range(ranks))] * chunks
    stage_ranks = tuple(path[:stages])
    orders: list[tuple[Slot, ...]] = []
    for rank in range(ranks):
        kept = [s for s in range(stages) if stage_ranks[s] == rank]
        forward = [Action(s, Phase.F, m) for m in range(microbatches) for s in kept]
        backward = [Action(s, Phase.B, m) for m in range(microbatches) for s in reversed(kept)]
        orders.append((*forward, *backward))
    return Schedule("virtual", stages, microbatches, stage_ranks, tuple(orders))


def overlapped(order: Schedule) -> Schedule:
    """Each neighbouring F and B of different microbatches becomes one slot."""
    orders: list[tuple[Slot, ...]] = []
    for slots in order.orders:
        merged: list[Slot] = []
        for slot in slots:
            before = merged[-1] if merged else None
            if (
                isinstance(before, Action)
                and isinstance(slot, Action)
                and {before.phase, slot.phase} == {Phase.F, Phase.B}
                and before.phase is Phase.B
                and before.microbatch != slot.microbatch
            ):
                merged[-1] = Overlap((before, slot))
            else:
                merged.append(slot)
        orders.append(tuple(merged))
    return replace(order, orders=tuple(orders))


def test_zero_bubble_reaches_the_bound() -> None:
    order = make_schedule("zb-h2", 4, 8)
    job = make_job(4, 8)
    plan = lower(job, order, make_costs(job))
    prediction = predict(plan)
    assert prediction.step_us == pytest.approx(prediction.bound_us)
    assert prediction.step_us == pytest.approx(prediction.bound_us)
