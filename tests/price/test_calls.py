"""What starting a collective and waiting for one that is done take on the compute lane."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.ir.flow import PHASES
from stretto.ir.program import WAIT
from stretto.ir.timeline import SpanKind
from stretto.price.calls import Calls, calls_us, line_through
from stretto.simulating import simulate
from tests.price.comm_job import comm_job
from tests.simulating.test_engine import schedule
from tests.synthetic_comm import make_comm_plan


def test_a_start_has_one_time_and_a_wait_goes_with_the_bytes() -> None:
    job = comm_job(2, tp=2)
    known = {("tp", "all_reduce"): Calls(5.0), ("tp", "reduce_scatter"): Calls(7.0, 60.0, 100.0, 30.0)}
    found = calls_us(job, known)
    kinds = set()
    for stage in job.stages:
        ops = {op.name: op for made in stage.ops.values() for op in made}
        for op in ops.values():
            started = ops[op.uses[0]] if op.target == WAIT else op
            asked = started.collective
            if asked is None or asked.kind == "all_gather":
                assert (stage.index, op.name) not in found
                continue
            kinds.add(asked.kind)
            calls = known["tp", asked.kind]
            mb = asked.nbytes / 1e6
            start_us = calls.start_us + calls.start_us_per_mb * mb
            finish_us = calls.finish_us + calls.finish_us_per_mb * mb
            expected = finish_us if op.target == WAIT else start_us
            assert found[stage.index, op.name] == pytest.approx(expected)
    assert kinds == {"all_reduce", "reduce_scatter"}


def test_starts_lie_on_a_line_that_never_falls() -> None:
    assert line_through([(1_000_000, 30.0), (0, 10.0)]) == pytest.approx((10.0, 20.0))
    assert line_through([(4_000_000, 50.0), (2_000_000, 30.0), (3_000_000, 99.0)]) == pytest.approx(
        (10.0, 10.0)
    )
    assert line_through([(1_000, 30.0), (2_000, 20.0)]) == (30.0, 0.0)
    assert line_through([(1_000, 30.0)]) == (30.0, 0.0)
    assert line_through([(1_000, 1.0), (2_000, 9.0)]) == pytest.approx((0.0, 8_000.0))


def test_what_a_wait_has_left_to_do_is_computing() -> None:
    plan = make_comm_plan(schedule("0F0 0B0"), op_us=100, start_us=3, collective_us=150)
    waits = {
        (stage.index, op.name): 40.0
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if op.target == WAIT
    }
    longer = replace(plan, costs=replace(plan.costs, op_us={**plan.costs.op_us, **waits}))
    before, after = simulate(plan), simulate(longer)
    extra_us = 40.0 * len(waits)
    assert len(waits) == 2
    assert after.total_us(SpanKind.COMPUTE, 0) == pytest.approx(
        before.total_us(SpanKind.COMPUTE, 0) + extra_us
    )
    assert after.total_us(SpanKind.EXPOSED, 0) <= before.total_us(SpanKind.EXPOSED, 0)
