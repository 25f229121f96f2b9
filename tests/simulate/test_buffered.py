"""Sends whose rest the transport has taken over: when their rank goes on, against cases done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.errors import PlanError
from stretto.ir.action import Schedule
from stretto.ir.plan import Instruction, InstructionKind, Plan
from stretto.ir.timeline import SpanKind, Timeline
from stretto.planning.lower import lower
from stretto.simulate import simulate
from tests.simulate.test_engine import NBYTES, RATE, lane, message, schedule
from tests.synthetic import make_plan

TWO = schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def off_plan(part: float, *, bytes_per_us: float = RATE, of: Schedule = TWO) -> Plan:
    """Two ranks that wait for each send at once. part: of a message, what the link buffers."""
    plan = make_plan(of, f_us=90, latency_us=10, bytes_per_us=bytes_per_us)
    windows, orders, communicators = lower(plan.job, of, overlap="off")
    link = replace(plan.costs.default_link, buffered_bytes=part * NBYTES)
    costs = replace(plan.costs, default_link=link)
    return replace(plan, windows=windows, orders=orders, communicators=communicators, costs=costs)


def stood_us(timeline: Timeline) -> list[tuple[float, float]]:
    """When rank 0 stood for its forwards' sends."""
    return [(a, b) for kind, name, a, b in lane(timeline, 0) if kind == "exposed" and " e0:" in name]


@pytest.mark.parametrize(
    ("part", "stood"),
    [
        (0.0, [(90, 110), (200, 220)]),
        (0.25, [(90, 105), (195, 210)]),
        (1.0, []),
        (100.0, []),
    ],
)
def test_a_rank_stands_until_no_more_than_the_buffer_is_left(
    part: float, stood: list[tuple[float, float]]
) -> None:
    timeline = simulate(off_plan(part))
    assert stood_us(timeline) == stood
    # The message itself takes as long as ever.
    assert message(timeline, "pp 0>1 e0:0").end_us == pytest.approx(120)


def test_what_is_left_of_earlier_messages_takes_room_in_the_buffer() -> None:
    # A message takes 200 us, and the buffer has room for one and a half. The second is sent at 180, when 0.55
    # of the first is left, and 0.05 more than there is room for: 10 us later there is.
    timeline = simulate(off_plan(1.5, bytes_per_us=NBYTES / 200))
    assert stood_us(timeline) == [(180, 190)]
    assert message(timeline, "pp 0>1 e0:1").start_us == pytest.approx(290)


def test_a_second_message_that_is_larger_than_what_is_left_waits_for_its_own_turn() -> None:
    # Half of the first is buffered when 100 us are left; the second is sent at 190 + 90, as the first ends.
    timeline = simulate(off_plan(0.5, bytes_per_us=NBYTES / 200))
    assert stood_us(timeline) == [(90, 190), (280, 390)]
    assert message(timeline, "pp 0>1 e0:1").start_us == pytest.approx(290)


def test_a_buffer_changes_no_step_that_waits_for_no_send() -> None:
    plan = make_plan(TWO, f_us=90, latency_us=10, bytes_per_us=RATE)
    link = replace(plan.costs.default_link, buffered_bytes=0.5 * NBYTES)
    buffered = replace(plan, costs=replace(plan.costs, default_link=link))
    assert simulate(buffered).spans == simulate(plan).spans


def test_a_larger_buffer_is_never_slower() -> None:
    steps = [
        simulate(off_plan(part, bytes_per_us=NBYTES / 150)).step_us for part in (0.0, 0.3, 0.7, 1.0, 2.0)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]
    timeline = simulate(off_plan(2.0, bytes_per_us=NBYTES / 150))
    assert timeline.total_us(SpanKind.EXPOSED, 1) > 0  # whoever needs a message stands for all of it


def posted_late(plan: Plan, rank: int, edge: int, microbatch: int, run: str) -> Plan:
    """The plan with a receive directly before the run that needs it."""
    receive = Instruction(InstructionKind.RECV, edge, (microbatch,))
    order = [instruction for instruction in plan.orders[rank] if instruction != receive]
    assert len(order) < len(plan.orders[rank])
    order.insert(order.index(Instruction(InstructionKind.RUN, run, (microbatch,))), receive)
    orders = tuple(tuple(order) if at == rank else of for at, of in enumerate(plan.orders))
    return replace(plan, orders=orders)


def test_nothing_is_taken_over_before_its_receive_is_posted() -> None:
    # The first arrives at 120, so the second's receive is posted at 210, when 1F0 has ended.
    timeline = simulate(posted_late(off_plan(100.0), 1, 0, 1, "1F"))
    assert stood_us(timeline) == [(180, 210)]


def test_a_buffer_hides_no_deadlock() -> None:
    """Each rank waits for its send, and posts what the other waits for behind that."""
    plan = off_plan(100.0, of=schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    simulate(plan)
    late = posted_late(posted_late(plan, 1, 0, 1, "1F"), 0, 1, 0, "0B")
    with pytest.raises(PlanError, match="for ever"):
        simulate(late)
