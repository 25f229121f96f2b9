"""Collectives in the walk: by hand, in the order of starts, on shared cards; sums; accounts by axis."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.costs import CollectiveCost, Processor
from stretto.ir.curve import Curve
from stretto.ir.plan import Item, ItemKind, Plan
from stretto.ir.timeline import SpanKind
from stretto.simulating import simulate
from tests.simulating.test_engine import lane, message, schedule
from tests.synthetic_comm import (
    ACTIVATION,
    NORM,
    WEIGHT,
    make_comm_costs,
    make_comm_job,
    make_comm_plan,
    plan_with,
)

ONE = schedule("0F0 0B0")
NORM_US = 50 * NORM.nbytes / ACTIVATION.nbytes


def reordered(plan: Plan, window: str, *names: str) -> Plan:
    """The window's ops in another order; where its only run is the last one, sums start at its end."""
    window = window if window in plan.windows else f"{window} last"
    sums = (item for item in plan.windows[window].items if item.part)
    items = (*(Item(ItemKind.OP, 0, name) for name in names), *sums)
    assert set(items) == set(plan.windows[window].items)
    return replace(plan, windows={**plan.windows, window: replace(plan.windows[window], items=items)})


def test_a_collective_runs_on_its_lane_and_its_wait_stands() -> None:
    timeline = simulate(make_comm_plan(ONE, op_us=100, start_us=3, collective_us=50))
    assert lane(timeline, 0)[:3] == [
        ("compute", "0F0", 0, 103),
        ("exposed", "tp all_reduce fr0.0", 103, 150),
        ("compute", "0F0", 150, 450),
    ]
    found = message(timeline, "tp all_reduce fr0.0")
    assert (found.lane, found.start_us, found.end_us, found.nbytes) == ("tp", 100, 150, ACTIVATION.nbytes)
    assert (found.stage, found.phase, found.microbatch, found.sender) == (0, Phase.F, 0, None)


def test_a_collective_that_finds_its_lane_busy_takes_its_whole_time_after_it() -> None:
    """What a start does is a part of its collective: no lane carries more than its link lets through."""
    plan = make_comm_plan(schedule("0F0 0F1 0B0 0B1"), op_us=1, start_us=30, collective_us=50)
    plan = replace(plan, costs=replace(plan.costs, op_us=dict.fromkeys(plan.costs.op_us, 0.0)))
    starts = {key: 30.0 if key[1].startswith("fr") else 0.0 for key in plan.costs.op_us}
    plan = replace(plan, costs=replace(plan.costs, op_us=starts))
    timeline = simulate(plan)
    first, second = (
        next(s for s in timeline.spans if s.name == "tp all_reduce fr0.0" and s.microbatch == mb)
        for mb in (0, 1)
    )
    assert (first.start_us, first.end_us) == (0, 50)
    assert (second.start_us, second.end_us) == (50, 100)


def test_ranks_that_share_a_place_wait_for_the_slowest_in_their_next_collective() -> None:
    plan = make_comm_plan(ONE, op_us=100, collective_us=50)
    order = ("d0", "bm0.0", "br0.0", "dn0", "br0.0_w", "by0.0", "dx0", "dw0.0")
    plan = reordered(plan, "0B", *order)
    even = simulate(plan)
    apart = simulate(replace(plan, costs=replace(plan.costs, skew=0.1)))
    # At fr0.0's wait ranks are apart by a tenth of 100, and then meet. br0.0 is done for 50 us when its wait
    # comes: of the 60 by which ranks are apart after 300 more in F and 300 in B, 10 are left to wait for.
    late = {s.name: s.duration_us for s in apart.spans if s.kind is SpanKind.EXPOSED}
    on_time = {s.name: s.duration_us for s in even.spans if s.kind is SpanKind.EXPOSED}
    assert "tp all_reduce br0.0" not in on_time
    assert late["tp all_reduce br0.0"] == pytest.approx(10)
    assert late["tp all_reduce fr0.0"] == pytest.approx(on_time["tp all_reduce fr0.0"] + 10)
    assert apart.total_us(SpanKind.COMPUTE, 0) == pytest.approx(even.total_us(SpanKind.COMPUTE, 0))


def test_ranks_come_apart_where_their_quota_stops_them() -> None:
    working = make_comm_plan(ONE, op_us=1000, collective_us=50)

    def step_us(plan: Plan, skew: float, quota_skew: float, period_us: float) -> float:
        quota = Processor(period_us, 0.5, skew=quota_skew)
        return simulate(replace(plan, costs=replace(plan.costs, skew=skew, processor=quota))).step_us

    # Work that goes on is stopped in every period: as far apart as if that were no quota's doing.
    even_us = step_us(working, 0.0, 0.0, 100.0)
    late_us = step_us(working, 0.0, 0.1, 100.0) - even_us
    assert late_us == pytest.approx(step_us(working, 0.1, 0.0, 100.0) - even_us, rel=0.15)
    # What a rank does that has waited is not stopped.
    standing = make_comm_plan(ONE, op_us=10, collective_us=1000)
    assert step_us(standing, 0.0, 0.5, 1000.0) == step_us(standing, 0.0, 0.0, 1000.0)
    assert step_us(working, 0.0, 0.5, 1000.0) > step_us(working, 0.0, 0.0, 1000.0)


def test_work_between_start_and_wait_hides_it() -> None:
    plan = make_comm_plan(ONE, op_us=100, collective_us=50)
    order = ("d0", "bm0.0", "br0.0", "dn0", "br0.0_w", "by0.0", "dx0", "dw0.0")
    in_order = ("d0", "bm0.0", "br0.0", "br0.0_w", "by0.0", "dx0", "dn0", "dw0.0")
    timeline = simulate(reordered(plan, "0B", *order))
    assert simulate(reordered(plan, "0B", *in_order)).step_us - timeline.step_us == pytest.approx(50)
    assert timeline.exposed_us["tp"] == pytest.approx(50 + NORM_US)
    assert timeline.comm_us["tp"] == pytest.approx(100 + NORM_US)
    assert timeline.hidden["tp"] == pytest.approx(50 / (100 + NORM_US))


def test_a_collective_slows_the_ops_that_it_meets() -> None:
    order = ("d0", "bm0.0", "br0.0", "dn0", "br0.0_w", "by0.0", "dx0", "dw0.0")
    base = make_comm_plan(ONE, op_us=100, collective_us=80)
    for kwargs in ({"slowdown": 0.5}, {"processor_us_per_mb": 40 / (ACTIVATION.nbytes / 1e6)}):
        slow = replace(base, costs=make_comm_costs(base.job, op_us=100, collective_us=80, **kwargs))
        # The op beside it gets 40 us done in the collective's 80, and the rest after.
        gained = (
            simulate(reordered(slow, "0B", *order)).step_us - simulate(reordered(base, "0B", *order)).step_us
        )
        assert gained == pytest.approx(40)


def test_gather_and_scatter_count_the_whole_tensor() -> None:
    timeline = simulate(make_comm_plan(ONE, axes=(("tp", 4),), sequence=True, collective_us=50))
    gather, scatter = (message(timeline, f"tp {k}") for k in ("all_gather fg0.0", "reduce_scatter fs0.0"))
    for span in (gather, scatter):
        assert span.nbytes == 4 * ACTIVATION.nbytes
        assert span.duration_us == pytest.approx(200)


def contended(shared: tuple[str, ...], latency_us: float = 0.0) -> Plan:
    """Rank 0 sends a message of 400 us and starts a collective of 300 us (and its latency) at one time."""
    order = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    job = make_comm_job(2, 2)
    costs = make_comm_costs(job, op_us=100, bytes_per_us=ACTIVATION.nbytes / 400, shared=shared)
    curve = Curve(((0.0, latency_us), (float(ACTIVATION.nbytes), 300.0 + latency_us)))
    collectives = {
        ("tp", kind): CollectiveCost(curve) for kind in ("all_reduce", "all_gather", "reduce_scatter")
    }
    return plan_with(job, order, replace(costs, collectives=collectives))


def second_of_rank_0(plan: Plan) -> tuple[float, float, float, float]:
    """Start and end of the first message, and of the collective that it meets."""
    timeline = simulate(plan)
    found = message(timeline, "pp 0>1 e0:0")
    (met,) = [
        s for s in timeline.spans if s.name == "tp all_reduce fr0.0" and s.microbatch == 1 and s.rank == 0
    ]
    return found.start_us, found.end_us, met.start_us, met.end_us


@pytest.mark.parametrize(
    ("shared", "latency_us", "expected"),
    [
        # Links of their own. Block: 100 + 300 + 200; the message leaves at 600; a collective starts at 700.
        ((), 0, (600, 1000, 700, 1000)),
        # From 700 on both go at half their rate: the 300 us that both have left take 600.
        (("tp",), 0, (600, 1300, 700, 1300)),
        # All 50 us later. From 750 to 1350 both go at half their rate; then 50 us of latency.
        (("tp",), 50, (650, 1350, 750, 1400)),
    ],
)
def test_a_shared_card_gives_each_an_equal_share(
    shared: tuple[str, ...], latency_us: float, expected: tuple[float, ...]
) -> None:
    assert second_of_rank_0(contended(shared, latency_us)) == pytest.approx(expected)


def test_processor_time_of_a_shared_transfer_does_not_grow_with_its_duration() -> None:
    """Half of the processor at full rate is a quarter at half the rate: as much is lost in all."""
    order = ("d0", "bm0.0", "br0.0", "dn0", "dw0.0", "br0.0_w", "by0.0", "dx0")
    takes = {"processor_us_per_mb": 100 / (ACTIVATION.nbytes / 1e6)}
    job = make_comm_job(1, 1)
    lost_us = []
    for shared in ((), ("tp",)):
        steps = []
        for kwargs in ({}, takes):
            costs = make_comm_costs(job, op_us=500, collective_us=200, shared=shared, **kwargs)
            steps.append(simulate(reordered(plan_with(job, ONE, costs), "0B", *order)).step_us)
        lost_us.append(steps[1] - steps[0])
    # Only the backward's collective meets ops. With nothing else on the card, sharing changes nothing.
    assert lost_us == pytest.approx([100, 100])
    plan = contended(("tp",))
    kinds = {key: replace(cost, **takes) for key, cost in plan.costs.collectives.items()}
    slow = replace(plan, costs=replace(plan.costs, collectives=kinds))
    # Rank 0's second collective lasts 600 us beside a message; nothing computes, so nothing is lost.
    assert second_of_rank_0(slow) == second_of_rank_0(plan)


def test_gradients_are_summed_on_the_lanes_of_their_axes() -> None:
    plan = make_comm_plan(ONE, axes=(("dp", 2), ("tp", 2)), collective_us={"dp": 400.0, "tp": 50.0})
    timeline = simulate(plan)
    tp, dp, late = (message(timeline, name) for name in ("tp 0.0", "dp 0.0", "dp 0.1"))
    assert (tp.lane, tp.nbytes, dp.lane, dp.nbytes) == ("tp", NORM.nbytes, "dp", WEIGHT.nbytes)
    assert dp.duration_us == pytest.approx(400 * WEIGHT.nbytes / ACTIVATION.nbytes)
    # The norm's gradient is summed over tp first.
    assert late.start_us >= max(tp.end_us, dp.end_us)
    assert {"dp loss", "dp 0.0", "dp 0.1"} <= {s.name for s in timeline.spans if s.name.startswith("dp")}
    assert set(timeline.exposed_us) == {"pp", "dp", "tp"}
    assert timeline.step_us == pytest.approx(late.end_us)


def test_the_loss_goes_along_dp_and_then_along_pp() -> None:
    order = schedule("0F0 0B0", "1F0 1B0")
    plan = make_comm_plan(order, axes=(("dp", 2),), latency_us=30, collective_us=1e6)
    (span, other) = [s for s in simulate(plan).spans if s.lane == "loss"]
    assert span.name == other.name == "pp loss"
    assert span.duration_us == pytest.approx(30 + 1e6 * 4 / ACTIVATION.nbytes)


def test_a_sum_of_one_place_does_not_wait_for_the_others() -> None:
    order = schedule("0F0 0B0", "1F0 1B0")
    timeline = simulate(make_comm_plan(order, axes=(("dp", 2),), op_us=100, collective_us=10))
    first, last = message(timeline, "dp 1.0"), message(timeline, "dp 0.0")
    assert first.start_us < last.start_us


def levels(plan: Plan, until: float) -> list[tuple[float, float]]:
    """(time, activations kept besides parameters) up to a time; a step between communications shows its
    highest and its last level."""
    (steps,) = simulate(plan).memory
    fixed = WEIGHT.nbytes + NORM.nbytes
    return [(round(at, 6), (kept - fixed) / ACTIVATION.nbytes) for at, kept in steps if at <= until]


def test_the_start_owns_the_result_until_the_waits_last_use() -> None:
    plan = make_comm_plan(ONE, op_us=100, collective_us=50)
    # fm0.0, and the result, which the start allocates at 100; fm0.0 goes. While it waits, nothing changes.
    # Then fy0.0 reads the result, which goes; it, y0, and the loss of 4 bytes make the highest.
    scalar = 4 / ACTIVATION.nbytes
    assert levels(plan, 449) == [(0, 0), (0, 1), (100, 2), (100, 1), (350, 2 + scalar)]


def test_a_result_stays_as_long_as_its_wait_is_to_come() -> None:
    plan = make_comm_plan(ONE, op_us=100, collective_us=500)
    late = reordered(plan, "0B", "d0", "bm0.0", "br0.0", "dn0", "dw0.0", "br0.0_w", "by0.0", "dx0")
    # Started at 1100; the lane waits for it from 1300 to 1600, with d0 for by0.0, the result, and gradients.
    grads = (WEIGHT.nbytes + NORM.nbytes) / ACTIVATION.nbytes
    assert levels(late, 1400)[-1][1] == 2 + grads


def test_what_a_plan_lacks_is_named() -> None:
    plan = make_comm_plan(ONE)
    with pytest.raises(PlanError, match="all_reduce on 'tp'"):
        simulate(replace(plan, costs=replace(plan.costs, collectives={})))
    with pytest.raises(PlanError, match="there is no communicator 'tp'"):
        simulate(replace(plan, communicators=()))
    with pytest.raises(PlanError, match="'0F'"):
        simulate(replace(plan, windows={}))


def test_a_wait_before_its_start_stops_the_plan() -> None:
    plan = make_comm_plan(ONE)
    early = reordered(plan, "0B", "d0", "br0.0_w", "bm0.0", "br0.0", "dn0", "dw0.0", "by0.0", "dx0")
    with pytest.raises(PlanError, match=r"window 0B last, br0.0_w: reads br0.0, which is made later"):
        simulate(early)


def test_a_wait_for_nothing_is_refused() -> None:
    plan = make_comm_plan(ONE)
    stage = plan.job.stages[0]
    forward = tuple(op for op in stage.ops[Phase.F] if op.name != "fr0.0")
    job = replace(plan.job, stages=(replace(stage, ops={**stage.ops, Phase.F: forward}),))
    items = tuple(item for item in plan.windows["0F"].items if item.ref != "fr0.0")
    windows = {**plan.windows, "0F": replace(plan.windows["0F"], items=items)}
    with pytest.raises(PlanError, match=r"is a view of 'fr0\.0', which stage 0 does not have"):
        simulate(replace(plan, job=job, windows=windows))


def test_a_sum_that_the_plan_does_not_have_is_refused() -> None:
    plan = make_comm_plan(ONE)
    assert any(item.part for item in plan.windows["0B last"].items)
    [stage] = plan.job.stages
    stage = replace(stage, ops={phase: stage.ops[phase] for phase in (Phase.F, Phase.I, Phase.W)})
    with pytest.raises(PlanError, match=r"stage 0 has no op 'tp\.0\.0' in its REDUCE_GRAD program"):
        simulate(replace(plan, job=replace(plan.job, stages=(stage,))))
