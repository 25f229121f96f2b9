"""The walk against cases done by hand: times, waits, links in order, late posts, lost processor time."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from stretto.errors import PlanError
from stretto.ir.action import Action, Phase, Schedule, parse_slot
from stretto.ir.costs import Costs, Link
from stretto.ir.plan import Instruction, InstructionKind, Plan
from stretto.ir.program import Edge, Ref
from stretto.ir.timeline import COMPUTE_LANE, Span, SpanKind, Timeline, without_closing_waits
from stretto.planning.lower import lower
from stretto.simulating import simulate
from stretto.simulating.cards import Cards, Clock
from stretto.simulating.compute_lane import Accounts
from stretto.simulating.engine import Walk
from stretto.simulating.network import Network
from tests.synthetic import ACTIVATION, make_costs, make_job, make_plan
from tests.synthetic_comm import plan_with

NBYTES = ACTIVATION.nbytes
RATE = NBYTES / 20  # A message keeps its link for 20 us.


def schedule(*orders: str, stage_ranks: tuple[int, ...] | None = None) -> Schedule:
    slots = tuple(tuple(parse_slot(token) for token in order.split()) for order in orders)
    actions = [a for order in slots for slot in order for a in slot.actions]
    stages = 1 + max(a.stage for a in actions)
    return Schedule(
        "by hand",
        stages,
        1 + max(a.microbatch for a in actions),
        stage_ranks or tuple(range(stages)),
        slots,
    )


ONE_F_ONE_B = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def lane(timeline: Timeline, rank: int, name: str = COMPUTE_LANE) -> list[tuple[str, str, float, float]]:
    return [
        (s.kind.value, s.name, round(s.start_us, 6), round(s.end_us, 6))
        for s in timeline.spans
        if s.rank == rank and s.lane == name
    ]


def message(timeline: Timeline, name: str) -> Span:
    (found,) = [s for s in timeline.spans if s.kind is SpanKind.MESSAGE and s.name == name]
    return found


def test_two_ranks_two_microbatches() -> None:
    plan = make_plan(ONE_F_ONE_B, f_us=90, i_us=100, w_us=100, latency_us=10, bytes_per_us=RATE)
    timeline = simulate(plan)
    assert timeline.step_us == pytest.approx(830)
    # The backward's message leaves when the input gradient is ready (310), not when the action ends (410).
    assert lane(timeline, 0) == [
        ("compute", "0F0", 0, 90),
        ("compute", "0F1", 90, 180),
        ("bubble", "pp 1>0 e1:0", 180, 310),
        ("exposed", "pp 1>0 e1:0", 310, 340),
        ("compute", "0B0", 340, 540),
        ("bubble", "pp 1>0 e1:1", 540, 600),
        ("exposed", "pp 1>0 e1:1", 600, 630),
        ("compute", "0B1", 630, 830),  # the loss arrives meanwhile
    ]
    assert lane(timeline, 1) == [
        ("bubble", "pp 0>1 e0:0", 0, 90),
        ("exposed", "pp 0>1 e0:0", 90, 120),
        ("compute", "1F0", 120, 210),
        ("compute", "1B0", 210, 410),
        ("compute", "1F1", 410, 500),
        ("compute", "1B1", 500, 700),
        ("bubble", "end of the step", 700, 830),
    ]
    assert timeline.by_rank(SpanKind.EXPOSED) == pytest.approx((60, 30))
    assert timeline.exposed_us["pp"] == pytest.approx(45)


def test_messages_of_a_communicator_go_in_order_and_latency_is_pipelined() -> None:
    plan = make_plan(ONE_F_ONE_B, f_us=90, latency_us=10, bytes_per_us=NBYTES / 200)
    timeline = simulate(plan)
    first, second = message(timeline, "pp 0>1 e0:0"), message(timeline, "pp 0>1 e0:1")
    assert (first.start_us, first.end_us) == (90, 300)
    assert (second.rank, second.lane, second.sender, second.nbytes, second.edge) == (
        1,
        "pp 0>1",
        0,
        NBYTES,
        0,
    )
    assert (second.stage, second.phase, second.microbatch) == (0, Phase.F, 1)
    # Started at 180; the link is free at 290, before the first message has arrived.
    assert (second.sent_us, second.start_us, second.end_us) == (180, 290, 500)


def test_a_receive_posted_late_holds_the_message_back() -> None:
    plan = make_plan(
        schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), f_us=90, latency_us=10, bytes_per_us=RATE
    )
    order = list(plan.orders[1])
    late = Instruction(InstructionKind.RECV, 0, (1,))
    order.remove(late)
    order.insert(order.index(Instruction(InstructionKind.RUN, "1F", (1,))), late)
    timeline = simulate(replace(plan, orders=(plan.orders[0], tuple(order))))
    span = message(timeline, "pp 0>1 e0:1")
    assert (span.sent_us, span.start_us, span.end_us) == (180, 210, 240)
    assert ("exposed", "pp 0>1 e0:1", 210, 240) in lane(timeline, 1)


def skip_plan(rate: float, processor_us_per_mb: float = 0.0) -> Plan:
    """Three stages; what stage 0 makes goes to stages 1 and 2."""
    job = make_job(3, 1)
    first, middle, last = job.stages
    h2, *rest = last.ops[Phase.F]
    skip = replace(h2, args=(*h2.args, Ref("y0")))
    last = replace(last, ops={**last.ops, Phase.F: (skip, *rest)})
    edge = Edge(len(job.edges), "y0", 0, Phase.F, 2, Phase.F, ACTIVATION)
    job = replace(job, stages=(first, middle, last), edges=(*job.edges, edge))
    order = schedule("0F0 0B0", "1F0 1B0", "2F0 2B0")
    costs = replace(make_costs(job, f_us=90), default_link=Link(0, rate, processor_us_per_mb))
    return lower(job, order, costs)


def test_one_sender_sends_to_one_receiver_at_a_time() -> None:
    timeline = simulate(skip_plan(RATE))
    first, second = message(timeline, "pp 0>1 e0:0"), message(timeline, "pp 0>2 e4:0")
    assert (first.start_us, first.end_us) == (90, 110)
    assert (second.sent_us, second.start_us, second.end_us) == (90, 110, 130)


def test_starts_of_messages_keep_the_link_and_latencies_do_not() -> None:
    plan = skip_plan(RATE)
    link = Link(7, RATE, 0.0, "made up", start_us=5)
    timeline = simulate(replace(plan, costs=replace(plan.costs, default_link=link)))
    first, second = message(timeline, "pp 0>1 e0:0"), message(timeline, "pp 0>2 e4:0")
    assert (first.start_us, first.end_us) == (90, 122)
    assert (second.sent_us, second.start_us, second.end_us) == (90, 115, 147)


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_messages_that_start_at_one_moment_the_lower_ranks_goes_first(first: int) -> None:
    """Both come to rank 2, anyone who's lane is walked first."""
    clock = Clock()
    plan = skip_plan(RATE)
    network = Network(plan, clock, Cards(clock, lambda *_: None, alone=True), [])
    edges = {plan.rank_of(e.source): e.index for e in plan.job.edges if plan.rank_of(e.target) == 2}
    for edge in edges.values():
        network.post(edge, 0)
    for rank in (first, 1 - first):
        network.send(edges[rank], 0)
    clock.step()
    clock.step()
    assert network.message(edges[0], 0).left.happened
    assert not network.message(edges[1], 0).left.happened


@pytest.mark.parametrize("link", [Link(0, RATE, 10 / (NBYTES / 1e6)), Link(0, RATE, processor_us=10.0)])
def test_a_transfer_takes_its_processor_time_from_the_ops_it_meets(link: Link) -> None:
    """By the megabyte or by the message: of 20 us on the link each end's processor loses 10."""
    plan = make_plan(ONE_F_ONE_B, f_us=90, i_us=100, w_us=100)
    timeline = simulate(replace(plan, costs=replace(plan.costs, default_link=link)))
    # Rank 0 sends at 90 and computes 0F1 meanwhile; rank 1 is idle, and loses nothing.
    assert ("compute", "0F1", 90, 190) in lane(timeline, 0)
    # 0F1's message transfers from 190 to 210 while rank 1 computes 1F0 from 110 on.
    assert ("compute", "1F0", 110, 210) in lane(timeline, 1)


def test_a_transport_slower_than_its_link_stops_the_compute_lane() -> None:
    plan = make_plan(ONE_F_ONE_B, f_us=90)
    link = Link(0, RATE, 40 / (NBYTES / 1e6))
    timeline = simulate(replace(plan, costs=replace(plan.costs, default_link=link)))
    assert message(timeline, "pp 0>1 e0:0").duration_us == pytest.approx(40)
    assert ("compute", "0F1", 90, 220) in lane(timeline, 0)


def test_action_us_is_paid_once_a_run() -> None:
    plan = make_plan(ONE_F_ONE_B)
    timeline = simulate(replace(plan, costs=replace(plan.costs, action_us=7.0)))
    assert lane(timeline, 0)[:2] == [("compute", "0F0", 0, 107), ("compute", "0F1", 107, 214)]
    # A run begins, and then waits at its first wait.
    assert lane(timeline, 1)[:3] == [
        ("compute", "1F0", 0, 7),
        ("bubble", "pp 0>1 e0:0", 7, 107),
        ("compute", "1F0", 107, 207),
    ]


def test_stages_of_one_rank_need_no_message() -> None:
    job = make_job(2, 1)
    order = schedule("0F0 1F0 1B0 0B0", stage_ranks=(0, 0))
    plan = lower(job, order, make_costs(job, latency_us=1e6))
    timeline = simulate(plan)
    assert timeline.step_us == pytest.approx(600)
    assert {s.kind for s in timeline.spans} == {SpanKind.COMPUTE}


def test_tied_gradients_are_summed_over_the_slowest_link() -> None:
    job = make_job(2, 1)
    parameters = tuple(replace(p, tied_to="w0") for p in job.parameters)
    job = replace(job, parameters=parameters)
    order = schedule("0F0 0B0", "1F0 1B0")
    links = {(1, 0): Link(3.0, 2**20 / 50)}
    costs = replace(make_costs(job), links=links)
    timeline = simulate(plan_with(job, order, costs))
    (span,) = [s for s in timeline.spans if s.lane == "tied w0" and s.rank == 0]
    # 2 (n - 1) / n of 1 MiB at 1 MiB in 50 us, and 3 us.
    assert span.duration_us == pytest.approx(53)
    assert lane(timeline, 0)[-1][:2] == ("exposed", "pp tied.w0")
    assert timeline.step_us == pytest.approx(span.end_us)


def test_a_deadlock_names_every_stuck_rank_and_what_it_waits_for() -> None:
    plan = make_plan(schedule("0F0 0B0", "1F0 1B0"))
    orders = list(plan.orders)
    orders[1] = tuple(i for i in orders[1] if i.kind is not InstructionKind.RECV)
    with pytest.raises(PlanError) as refused:
        simulate(replace(plan, orders=tuple(orders)))
    text = str(refused.value)
    assert "rank 0, run 0B:0: deadlock: waits for e1:0 (" in text
    assert "which rank 1 has not sent. " in text
    assert "rank 1, run 1F:0: deadlock: waits for e0:0 (" in text
    assert "whose receive rank 1 has not posted. " in text


def test_receives_in_another_order_than_the_sends_stop_the_plan() -> None:
    plan = make_plan(schedule("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"))
    orders = list(plan.orders)
    orders[1] = tuple(i for i in orders[1] if str(i) != "recv e0:0")
    with pytest.raises(PlanError, match=r"rank 1, run 1F:1: .* e0:1 .* whose receive rank 1 has not posted"):
        simulate(replace(plan, orders=tuple(orders)))


def test_a_value_that_the_rank_makes_later_stops_the_plan() -> None:
    job = make_job(2, 1)
    order = schedule("1F0 0F0 1B0 0B0", stage_ranks=(0, 0))
    with pytest.raises(PlanError, match=r"e0:0 .*, which stage 0 of the same rank has not made yet"):
        simulate(lower(job, order, make_costs(job)))


def test_a_missing_cost_is_refused() -> None:
    plan = make_plan(schedule("0F0 0B0", "1F0 1B0"))
    costs = Costs({}, {}, Link(0, 1), 0.0, "none")
    with pytest.raises(PlanError, match="stage 0's op h0 has no time"):
        simulate(replace(plan, costs=costs))


def test_work_that_ends_as_a_message_begins_is_not_held_up_by_it() -> None:
    order = schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    plan = make_plan(order, f_us=90, i_us=100, w_us=100, bytes_per_us=RATE)
    # A message takes a full processor at both ends, so rank 0 makes value 1 when rank 1 has used value 0.
    link = replace(plan.costs.link(0, 1), processor_us_per_mb=20 / (NBYTES / 1e6))
    costs = replace(plan.costs, links=dict.fromkeys(((0, 1), (1, 0)), link))
    timeline = simulate(replace(plan, costs=costs))
    first = next(s for s in timeline.spans if s.rank == 1 and s.name == "1F0")
    assert message(timeline, "pp 0>1 e0:1").start_us == pytest.approx(first.end_us)
    assert first.end_us - first.start_us == pytest.approx(90)


def test_work_too_short_for_the_clock_parts_the_stalls_around_it() -> None:
    """Both stalls wait for the same: one span over both would have the work within it."""
    spans: list[Span] = []
    accounts = Accounts(0, spans, 0)
    accounts.stall(0.0, 1.0, 0.0, "tp sum")
    accounts.extend(Action(0, Phase.F, 0), 1.0)
    accounts.action_end_us = 1.0
    accounts.flush()
    accounts.stall(1.0, 2.0, 1.0, "tp sum")
    accounts.stall(2.0, 3.0, 2.0, "tp sum")
    assert [(s.name, s.start_us, s.end_us) for s in spans] == [
        ("tp sum", 0.0, 1.0),
        ("0F0", 1.0, 1.0),
        ("tp sum", 1.0, 3.0),
    ]


def test_a_simulation_leaves_no_garbage() -> None:
    plan = make_plan(ONE_F_ONE_B)
    never = replace(plan, orders=(plan.orders[0], ()))
    gc.collect()
    gc.disable()
    try:
        simulate(plan)
        with pytest.raises(PlanError):
            simulate(never)
        walks = [x for x in gc.get_objects() if isinstance(x, (Walk, Cards, Network))]
        assert walks == []
    finally:
        gc.enable()


def _span(rank: int, kind: SpanKind, start: float, end: float) -> Span:
    return Span(rank, COMPUTE_LANE, kind, "dp 0.1", start, end, phase=Phase.B if kind == "compute" else None)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        # Rank 1 ends before the step does: all of its last wait is a bubble.
        (90.0, [(SpanKind.BUBBLE, 50.0, 90.0)]),
        # It ends with the step: from 80 on no rank works, and a shorter sum would make the step shorter.
        (100.0, [(SpanKind.BUBBLE, 50.0, 80.0), (SpanKind.EXPOSED, 80.0, 100.0)]),
    ],
)
def test_a_rank_with_no_op_left_waits_for_the_end(
    end: float, expected: list[tuple[SpanKind, float, float]]
) -> None:
    spans = [
        _span(0, SpanKind.COMPUTE, 0.0, 80.0),
        _span(0, SpanKind.EXPOSED, 80.0, 100.0),
        _span(1, SpanKind.EXPOSED, 10.0, 20.0),
        _span(1, SpanKind.COMPUTE, 20.0, 50.0),
        _span(1, SpanKind.EXPOSED, 50.0, end),
    ]
    result = without_closing_waits(spans)
    assert result[:4] == spans[:4]
    assert [(span.kind, span.start_us, span.end_us) for span in result[4:]] == expected
