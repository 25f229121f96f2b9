"""The accounts of overlap: what is counted, what could have been hidden, and what weight gradients cover."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.bench.hidden import (
    Work,
    account,
    backward_actions,
    covered_by_w,
    exposed_by_name,
    exposed_us,
    steady_actions,
    work_of,
)
from stretto.ir.action import Action, Phase, Schedule, parse_slot
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.program import Job
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline
from tests.synthetic_comm import make_comm_job


def schedule_of(*tokens: str) -> Schedule:
    return Schedule("by hand", 1, 3, (0,), (tuple(parse_slot(token) for token in tokens),))


PAIRED = schedule_of("0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "0B2")
PLAIN = schedule_of("0F0", "0B0", "0F1", "0B1", "0F2", "0B2")


def costs_of(job: Job, op_us: float, collective_us: float, processor_us_per_mb: float = 0.0) -> Costs:
    """Every op that is no wait and no start takes `op_us`, every collective `collective_us`."""
    times = {
        (stage.index, op.name): 0.0 if op.target.startswith("comm.") else op_us
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }
    cost = CollectiveCost(Curve(((0.0, collective_us), (1e9, collective_us))), processor_us_per_mb)
    return Costs(
        times, {}, Link(0.0, 1.0), 0.0, "by hand", {("tp", k): cost for k in ("all_reduce", "all_gather")}
    )


def test_the_steady_state_is_the_same_work_with_and_without_pairs() -> None:
    found = steady_actions(PAIRED, 0)
    assert found == {Action.parse(token) for token in ("0F1", "0B0", "0F2", "0B1")}
    assert steady_actions(PLAIN, 0) == found
    ends = schedule_of("(0F0;0F1)OVERLAP_F_B", "(0F2;0B0)OVERLAP_F_B", "(0B1;0B2)OVERLAP_F_B")
    assert steady_actions(ends, 0) == {Action.parse(token) for token in ("0F2", "0B0")}
    assert backward_actions(PAIRED, 0) == {Action(0, Phase.B, mb) for mb in range(3)}


def span(kind: SpanKind, name: str, start: float, end: float, rank: int = 0) -> Span:
    return Span(rank, COMPUTE_LANE, kind, name, start, end)


def test_waits_belong_to_the_window_in_which_they_stand() -> None:
    timeline = Timeline(
        "measured",
        2,
        200.0,
        (
            span(SpanKind.COMPUTE, "0F0", 0, 10),
            span(SpanKind.EXPOSED, "tp all_reduce a", 10, 17),
            span(SpanKind.COMPUTE, "0F0", 17, 20),
            span(SpanKind.COMPUTE, "0F1", 20, 25),
            span(SpanKind.COMPUTE, "0B0", 25, 30),
            span(SpanKind.EXPOSED, "tp all_reduce a", 30, 33),
            span(SpanKind.BUBBLE, "tp all_reduce b", 33, 40),
            span(SpanKind.EXPOSED, "tp all_reduce b", 40, 45),
            span(SpanKind.EXPOSED, "pp 0>1 e0:1", 45, 60),
            span(SpanKind.COMPUTE, "0F1", 60, 80),
            span(SpanKind.EXPOSED, "tp all_reduce a", 80, 82),
            span(SpanKind.COMPUTE, "0B0", 82, 90),
            span(SpanKind.COMPUTE, "0F1", 0, 1, rank=1),
            span(SpanKind.EXPOSED, "tp all_reduce a", 1, 100, rank=1),
        ),
        (0, 0),
    )
    assert exposed_us(timeline, 0, PAIRED) == 17.0
    # The last of them follows a piece of the forward, in a window that has a backward as well.
    assert exposed_us(timeline, 0, PAIRED, [Action.parse("0B0")]) == 10.0
    assert exposed_us(timeline, 0, PAIRED, steady_actions(PAIRED, 0)) == 10.0
    assert exposed_us(timeline, 0, PLAIN, [Action.parse("0B0")]) == 8.0
    names = exposed_by_name(timeline, 0, PAIRED)
    assert list(names.items()) == [("tp all_reduce a", 12.0), ("tp all_reduce b", 5.0)]
    assert exposed_us(timeline, 1, replace(PAIRED, orders=PAIRED.orders * 2)) == 99.0


@pytest.mark.parametrize(
    ("compute", "collective", "processor", "hideable"),
    [
        (100.0, 60.0, 0.0, 60.0),  # compute covers all
        (60.0, 100.0, 0.0, 60.0),  # no more than there is to compute
        (60.0, 100.0, 25.0, 80.0),  # compute at three quarters of its speed lasts 80
        (60.0, 100.0, 50.0, 100.0),
        (10.0, 100.0, 100.0, 100.0),  # the transport leaves nothing of the processor
        (10.0, 0.0, 0.0, 0.0),
    ],
)
def test_what_could_be_hidden(compute: float, collective: float, processor: float, hideable: float) -> None:
    work = Work(compute, collective, processor, 0.0, 0.0)
    assert work.hideable_us() == pytest.approx(hideable)
    assert work.hideable_us(2 * collective) == pytest.approx(2 * hideable)


def test_the_work_of_a_microbatch() -> None:
    job = make_comm_job(1, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0, processor_us_per_mb=20.0)
    (stage,) = job.stages
    starts = [op.collective for ops in stage.ops.values() for op in ops if op.collective is not None]
    moved = sum(asked.nbytes for asked in starts)
    plain = sum(not op.target.startswith("comm.") for ops in stage.ops.values() for op in ops)
    work = work_of(job, costs, [0])
    assert len(starts) == 4
    assert work.compute_us == 10.0 * plain
    assert work.collective_us == 160.0
    assert work.processor_us == pytest.approx(20.0 * moved / 1e6)
    assert work.wire_bytes == moved  # two ranks: half there, half back
    assert work.message_bytes == 0.0, "no other place"
    backward = work_of(job, costs, [0], [Phase.B])
    assert backward.collective_us == 80.0
    assert backward.compute_us + work_of(job, costs, [0], [Phase.F]).compute_us == work.compute_us


def test_messages_leave_for_other_places_only() -> None:
    job = make_comm_job(3, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0)
    there, back = ([e for e in job.edges if e.source == 1 and e.target == target] for target in (2, 0))
    assert there
    assert back
    nbytes = {edge: edge.spec.nbytes for edge in job.edges}
    assert work_of(job, costs, [1]).message_bytes == sum(nbytes[edge] for edge in (*there, *back))
    assert work_of(job, costs, [1], [Phase.F]).message_bytes == sum(nbytes[edge] for edge in there)
    assert work_of(job, costs, [1, 2]).message_bytes == sum(nbytes[edge] for edge in back)


@pytest.mark.parametrize(
    ("op_us", "covered"),
    [
        # Before the first collective of I: dn and the first dw. Before the second, one dw more.
        (10.0, 30.0),
        (30.0, 40.0 + 40.0),  # 60 for 40, and 20 that are left and 30 for 40
        (15.0, 30.0 + 15.0),
        (100.0, 80.0),  # no more than the collectives take
    ],
)
def test_weight_gradients_cover_the_collectives_that_find_them(op_us: float, covered: float) -> None:
    job = make_comm_job(1, 3, blocks=2)
    assert covered_by_w(job, costs_of(job, op_us, 40.0), [0]) == pytest.approx(covered)


def test_a_transport_that_takes_the_processor_makes_weight_gradients_last() -> None:
    job = make_comm_job(1, 3, blocks=2)
    costs = costs_of(job, 10.0, 100.0)
    starts = [op.collective for op in job.stages[0].ops[Phase.I] if op.collective is not None]
    half = 50.0 / (starts[0].nbytes / 1e6)
    slow = {key: replace(cost, processor_us_per_mb=half) for key, cost in costs.collectives.items()}
    assert covered_by_w(job, costs, [0]) == pytest.approx(30.0)
    assert covered_by_w(job, replace(costs, collectives=slow), [0]) == pytest.approx(60.0)
    nothing = {key: replace(cost, processor_us_per_mb=4 * half) for key, cost in slow.items()}
    # 200 us of the processor for each collective: they take as long, and compute stands still.
    assert covered_by_w(job, replace(costs, collectives=nothing), [0]) == pytest.approx(400.0)


def test_accounts_of_a_step() -> None:
    job = make_comm_job(1, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0)
    exposed = {"off": (320.0, 240.0), "local": (250.0, 150.0), "window": (64.0, 80.0)}
    found = account(exposed, job, costs, PAIRED, 0)
    work = work_of(job, costs, [0])
    hideable = 320.0 * work.compute_us / 160.0
    assert hideable < 320.0
    assert found["window"].hideable_us == pytest.approx(hideable)
    assert found["window"].hidden == pytest.approx(
        1.0 - (64.0 - (320.0 - hideable)) / (320.0 - (320.0 - hideable))
    )
    assert found["off"].hidden == 0.0
    assert found["local"].of_covered == pytest.approx((240.0 - 150.0) / (3 * 30.0))
