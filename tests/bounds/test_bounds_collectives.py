"""Bounds with collectives: hand cases, words, and that no order of ops beats them, whatever overlaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.bounds.step import lower_bound
from stretto.errors import PlanError
from stretto.ir.costs import CollectiveCost, Costs, Link, Processor
from stretto.ir.curve import Curve
from stretto.ir.placements import IN_DTYPE
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.planning.pair import full
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.schedule.once import with_once
from stretto.schedule.timing import peak_live
from stretto.simulating import simulate
from tests.bounds.test_bounds import overlapped, virtual
from tests.synthetic_comm import ACTIVATION, KINDS, make_comm_costs, make_comm_job, plan_with, shuffled


def test_a_microbatch_alone_waits_for_its_collectives() -> None:
    job = make_comm_job(1, 1, blocks=3)
    bound = lower_bound(job, (0,), make_comm_costs(job, op_us=10, collective_us=1000))
    # Six collectives in a chain, and on it m and y of each block, y0, d0 (or the loss) and dx0.
    assert bound.parts["critical path"] == pytest.approx(6 * 1000 + 12 * 10 + 4 * 10)


def test_the_load_of_a_lane_binds() -> None:
    job = make_comm_job(1, 10)
    costs = make_comm_costs(job, op_us=1, collective_us=1000)
    bound = lower_bound(job, (0,), costs)
    # fm0.0 before the first; by0.0 and dx0 after the last; the norm's sum is small and comes once.
    once_us = 1000 * 2048 / ACTIVATION.nbytes
    assert bound.parts["rank 0 tp"] == pytest.approx(1 + 10 * 2000 + 2 + once_us, rel=1e-4)
    assert bound.binds.startswith("pipeline rank 0's tp collectives (10 x 2 ms")


def test_collectives_hidden_by_compute_leave_compute_to_bind() -> None:
    job = make_comm_job(1, 10)
    bound = lower_bound(job, (0,), make_comm_costs(job, op_us=1000, collective_us=10))
    assert bound.binds.startswith("pipeline rank 0's compute (10 x 10 ms)")


def test_lost_speed_counts_where_it_cannot_fall_into_idle_time() -> None:
    job = make_comm_job(1, 10)
    free = lower_bound(job, (0,), make_comm_costs(job, op_us=1000, collective_us=100))
    slow = lower_bound(job, (0,), make_comm_costs(job, op_us=1000, collective_us=100, slowdown=0.5))
    # Twenty collectives of 100 us, each at half speed, but for what the head and the tail may take.
    assert slow.us - free.us == pytest.approx(20 * 50, rel=0.5)
    assert "lost to communication" in slow.binds


def test_gradients_of_data_parallel_ranks_are_summed_after_all_that_adds_to_them() -> None:
    job = make_comm_job(1, 3, axes=(("dp", 4),))
    bound = lower_bound(job, (0,), make_comm_costs(job, op_us=100, collective_us=500))
    # Every op of every microbatch, but by0.0 and dx0 of the last, comes before the sums of W's gradients.
    sum_us = 500 * (512 * 256 * 4 + 2048) / ACTIVATION.nbytes
    assert bound.parts["rank 0 dp"] == pytest.approx(3 * 700 + sum_us)


def test_shared_cards_carry_messages_and_collectives() -> None:
    job = make_comm_job(2, 10)
    kwargs = {"op_us": 1.0, "collective_us": 500.0, "bytes_per_us": ACTIVATION.nbytes / 500}
    alone = lower_bound(job, (0, 1), make_comm_costs(job, **kwargs))
    shared = lower_bound(job, (0, 1), make_comm_costs(job, **kwargs, shared=("tp",)))
    # Each microbatch: a message of 500 us, which leaves after a collective; where the card is shared, two
    # collectives of 500 us more.
    assert alone.parts["rank 0 sends"] == pytest.approx(503 + 10 * 500 + 2012)
    assert shared.parts["rank 0 sends"] == pytest.approx(1 + 10 * 1500 + 2)
    assert shared.us > alone.us


def test_a_limit_of_live_microbatches_binds() -> None:
    job = replace(make_comm_job(3, 12), max_live=1)
    bound = lower_bound(job, (0, 1, 2), make_comm_costs(job, op_us=100, collective_us=50))
    assert bound.binds.startswith("stage 0's limit of 1 live microbatch (12 x ")
    # With one live microbatch nothing overlaps: twelve round trips.
    plan = plan_with(
        job,
        make_schedule("1f1b", 3, 12, max_live=1),
        make_comm_costs(job, op_us=100, collective_us=50),
    )
    assert simulate(plan).step_us == pytest.approx(bound.us, rel=0.15)


def test_a_familys_own_limit_can_be_asked_about() -> None:
    order = make_schedule("1f1b", 4, 16)
    job = make_comm_job(4, 16)
    costs = make_comm_costs(job, op_us=100, latency_us=1000)
    own = lower_bound(replace(job, max_live=max(peak_live(order))), order, costs)
    assert own.binds.startswith("stage 0's limit of 4 live microbatches (16 x 9.3 ms / 4)")
    assert own.us > lower_bound(job, order, costs).us
    assert own.us <= simulate(plan_with(job, order, costs)).step_us


def test_a_collective_without_a_cost_is_refused() -> None:
    job = make_comm_job(2, 2)
    costs = replace(make_comm_costs(job), collectives={})
    with pytest.raises(PlanError, match="all_reduce on 'tp' has no cost"):
        lower_bound(job, (0, 1), costs)


def test_equal_stages_are_bounded_as_unequal_ones_are() -> None:
    """Stages that differ in nothing share their distances; a hair of difference must change nothing else."""
    job = make_comm_job(5, 4, blocks=2, sequence=True)
    costs = make_comm_costs(job, op_us=100)
    names = {key: us + 1e-9 * at for at, (key, us) in enumerate(costs.op_us.items())}
    same, unequal = (lower_bound(job, range(5), c) for c in (costs, replace(costs, op_us=names)))
    assert same.parts == {name: pytest.approx(us) for name, us in unequal.parts.items()}


def test_a_quota_gives_a_stretch_little_more_than_its_time() -> None:
    """A chain of long ops takes their times, less what a rank that waited has left of two periods, once
    before an op and once behind it."""
    job = make_comm_job(1, 1, axes=(), blocks=4)
    costs = make_comm_costs(job, op_us=1000.0)
    free = lower_bound(job, (0,), costs).parts["critical path"]
    limited = lower_bound(job, (0,), replace(costs, processor=Processor(100.0, 0.5))).parts["critical path"]
    assert free - 200.0 - 1e-6 <= limited < free
    short = lower_bound(job, (0,), replace(costs, processor=Processor(1e6, 0.5))).parts["critical path"]
    assert free / 2.0 - 1000.0 <= short <= free / 2.0, "while the quota lasts, ops go at full speed"


def test_a_start_that_its_own_collective_slows_takes_nothing_of_what_follows() -> None:
    job = make_comm_job(1, 1)
    costs = make_comm_costs(job, op_us=1, start_us=100, collective_us=300, slowdown=0.2)
    bound = lower_bound(job, (0,), costs)
    step_us = simulate(plan_with(job, make_schedule("1f1b", 1, 1), costs)).step_us
    for name, us in bound.parts.items():
        assert us <= step_us * (1 + 1e-9), name


# --- the property ------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 5))
    kind = draw(st.sampled_from([*FAMILIES, "virtual", "overlapped", "whole"]))
    max_live = None
    if kind == "virtual":
        order = virtual(ranks, 2, microbatches)
    elif kind == "overlapped":
        order = overlapped(make_schedule("1f1b", ranks, microbatches))
    elif kind == "whole":
        joined = full(make_schedule("1f1b", ranks, microbatches))
        assert joined is not None
        order = joined
    else:
        if FAMILIES[kind].keeps_any_limit:
            max_live = draw(st.none() | st.integers(1, 3))
        order = make_schedule(kind, ranks, microbatches, max_live=max_live)
    axes = draw(st.sampled_from([(), (("tp", 2),), (("dp", 2),), (("dp", 2), ("tp", 4))]))
    job = make_comm_job(
        order.stages,
        microbatches,
        axes=axes,
        blocks=draw(st.integers(1, 3)),
        sequence=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    made_of = draw(st.sampled_from(["", "another dtype", "rows"])) if dict(axes).get("dp") else ""
    job = replace(with_made(job, made_of) if made_of else job, max_live=max_live)
    time_us = st.floats(0, 200)
    op_us = {key: draw(time_us) for key in make_comm_costs(with_once(job, order)).op_us}

    def link() -> Link:
        rate = ACTIVATION.nbytes / draw(st.floats(0.1, 300))
        lost_us = draw(st.sampled_from([0, 20, 100, 600]))
        each_us, message_us = draw(st.sampled_from([(0.0, 0.0), (30.0, 0.0), (10.0, 25.0)]))
        return Link(draw(st.floats(0, 100)), rate, lost_us, "drawn", each_us, message_us)

    def collective() -> CollectiveCost:
        latency_us, each_us = draw(st.floats(0, 50)), draw(st.floats(0.1, 400))
        curve = Curve(((0.0, latency_us), (float(ACTIVATION.nbytes), latency_us + each_us)))
        return CollectiveCost(
            curve,
            draw(st.sampled_from([0.0, 50.0, 900.0])),
            draw(st.sampled_from([0.0, 0.2, 0.9])),
            processor_us=draw(st.sampled_from([0.0, 30.0])),
        )

    links = {(a, b): link() for a in range(ranks) for b in range(ranks) if a != b}
    collectives = {(axis, kind): collective() for axis, _ in axes for kind in KINDS}
    shared = draw(st.sampled_from([(), ("tp",), ("dp", "tp")]))
    action_us = draw(st.sampled_from([0.0, 15.0]))
    skew = draw(st.sampled_from([0.0, 0.1]))
    limits = ((150.0, 0.5), (1000.0, 0.2), (150.0, 0.5, 0.7), (20.0, 0.5))
    quota = draw(st.sampled_from([None, None, *(Processor(*limit) for limit in limits)]))
    costs = Costs(op_us, links, Link(0, 1e9), action_us, "drawn", collectives, shared, skew, quota)
    plan = plan_with(job, order, costs, overlap=draw(st.sampled_from(["off", "local"])))
    return shuffled(plan, draw(st.integers(0, 10**6))) if made_of != "rows" and draw(st.booleans()) else plan


def with_made(job: Job, of: str) -> Job:
    """The job whose parameters are made once a step: of another dtype, or of rows as well."""
    kept = ("dp",) if of == "rows" else ()
    parameters = (replace(p, own_dtype="float64", kept=kept) for p in job.parameters)
    return replace(job, parameters=tuple(parameters), zero=1 if kept else 0)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_no_order_of_ops_beats_any_bound(plan: Plan) -> None:
    check_bounds(plan)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(plans())
def test_no_order_of_ops_of_many_beats_any_bound(plan: Plan) -> None:
    check_bounds(plan)


def test_what_is_made_once_a_step_counts_in_its_head_and_in_the_load_of_its_rank() -> None:
    """Each of two ranks takes 100 us to make what it reads; the second does so while it waits."""
    job = make_comm_job(2, 4, axes=())
    plain = lower_bound(job, (0, 1), make_comm_costs(job, op_us=100))
    order = make_schedule("1f1b", 2, 4)
    made = with_made(job, "another dtype")
    costs = make_comm_costs(job, op_us=100)
    copies = {(at, op.name): 100.0 for at, op in with_once(made, order).all_ops if op.target == IN_DTYPE}
    assert len(copies) == 2
    costs = replace(costs, op_us={**costs.op_us, **copies})
    bound = lower_bound(made, order, costs)
    for name in ("critical path", "rank 0 compute", "rank 1 compute"):
        assert bound.parts[name] == pytest.approx(plain.parts[name] + 100), name
    check_bounds(plan_with(made, order, costs))


def check_bounds(plan: Plan) -> None:
    timeline = simulate(plan)
    bound = lower_bound(plan.job, plan.schedule, plan.costs)
    assert bound.us == max(bound.parts.values())
    for name, us in bound.parts.items():
        assert us <= timeline.step_us * (1 + 1e-9) + 1e-6, name
    job = replace(plan.job, max_live=max(peak_live(plan.schedule)))
    own = lower_bound(job, plan.schedule, plan.costs)
    assert own.us <= timeline.step_us * (1 + 1e-9) + 1e-6, own.binds
