"""A simulated step around a real rank: one that keeps to the predicted times makes the simulated step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.ir.plan import InstructionKind, Plan
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.simulating import simulate
from stretto.simulating.collectives import RunningCollective
from stretto.simulating.live import Live, calls_of
from stretto.simulating.network import Message
from stretto.simulating.windows import Control, make_ready
from tests.synthetic_comm import make_comm_costs, make_comm_job, plan_with


def walked(plan: Plan, pp_rank: int, late_us: float = 0.0) -> float:
    """The step when the real rank takes the predicted times, and starts `late_us` late."""
    windows = {name: make_ready(plan, name) for name in plan.windows}
    live = Live(plan, pp_rank, windows)
    works = {lane: iter(found) for lane, found in calls_of(plan, pp_rank, windows).items()}
    started: dict[object, RunningCollective] = {}
    messages: dict[tuple[int, int], Message] = {}
    sent: dict[tuple[int, int], Message] = {}
    made: set[tuple[int, int]] = set()
    now_us = late_us
    live.begin()
    for instruction in plan.orders[pp_rank]:
        live.clock.advance(now_us)
        if instruction.kind is InstructionKind.RECV:
            message = (int(instruction.ref), instruction.microbatches[0])
            messages[message] = live.network.post(*message)
        elif instruction.kind is InstructionKind.SENT:
            found = sent[int(instruction.ref), instruction.microbatches[0]]
            now_us = max(now_us, live.until(found.left, found.name))
        else:
            for segment in windows[str(instruction.ref)].segments:
                now_us += segment.work_us
                live.clock.advance(now_us)
                microbatch = instruction.microbatches[segment.control_part]
                key = (segment.edge, microbatch)
                if segment.control is Control.START and segment.call is not None:
                    work, at = next(works[segment.call.axis])
                    assert (work, at) == (segment.call, microbatch)
                    started[segment.call.key, microbatch] = live.collectives.start(work, pp_rank, microbatch)
                elif segment.control is Control.FINISH and segment.call is not None:
                    done = started[segment.call.key, microbatch].done
                    now_us = max(now_us, live.until(done, segment.call.name))
                elif segment.local:
                    made.add(key)
                elif segment.control is Control.SEND:
                    sent[key] = live.network.send(*key)
                elif segment.control is Control.RECEIVE:
                    now_us = max(now_us, live.until(messages[key].arrived, messages[key].name))
    return live.end(now_us)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    order = make_schedule(draw(st.sampled_from(sorted(FAMILIES))), ranks, microbatches)
    axes = draw(st.sampled_from([(("tp", 2),), (("dp", 2), ("tp", 2)), ()]))
    job = make_comm_job(order.stages, microbatches, axes=axes, sequence=draw(st.booleans()), tied=True)
    shared = ("tp",) if axes and draw(st.booleans()) else ()
    costs = make_comm_costs(job, latency_us=draw(st.integers(0, 200)), bytes_per_us=5e3, shared=shared)
    uneven = {key: us * (0.9 + 0.2 * Random(str(key)).random()) for key, us in costs.op_us.items()}
    return plan_with(job, order, replace(costs, op_us=uneven) if draw(st.booleans()) else costs)


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_a_rank_that_keeps_to_the_prediction_makes_the_simulated_step(
    plan: Plan, data: st.DataObject
) -> None:
    pp_rank = data.draw(st.integers(0, plan.ranks - 1))
    assert walked(plan, pp_rank) == pytest.approx(simulate(plan).step_us, rel=1e-9)


def late_plan() -> Plan:
    job = make_comm_job(2, 4)
    return plan_with(job, make_schedule("1f1b", 2, 4), make_comm_costs(job, latency_us=100.0))


def test_a_wait_that_cannot_end_is_refused() -> None:
    plan = late_plan()
    live = Live(plan, 1)
    live.begin()
    message = live.network.post(0, 3)  # the peer sends microbatch 3 last, and will wait for gradients before
    with pytest.raises(PlanError, match="rank 1 waits forever: waits for it"):
        live.until(message.arrived, "it")
