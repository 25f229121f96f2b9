"""Properties of the walk with collectives, over random jobs, families, placements, costs and op orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.ir.action import Phase
from stretto.ir.costs import CollectiveCost
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.timeline import COMPUTE_LANE, SpanKind
from stretto.schedule.families import FAMILIES, make_schedule
from stretto.simulating import predict, simulate
from tests.bounds.test_bounds_collectives import plans
from tests.synthetic_comm import make_comm_plan


@settings(max_examples=50, deadline=None)
@given(plans())
def test_accounts_add_up_and_hidden_is_a_share(plan: Plan) -> None:
    timeline = simulate(plan)
    found = predict(plan, timeline)
    for rank in range(plan.ranks):
        parts = (found.compute_us[rank], found.exposed_us[rank], found.bubble_us[rank])
        assert sum(parts) == pytest.approx(timeline.step_us)
        assert timeline.peak_bytes[rank] == max(kept for _, kept in timeline.memory[rank])
        at_us = 0.0
        for span in (s for s in timeline.spans if s.rank == rank and s.lane == COMPUTE_LANE):
            assert span.start_us == pytest.approx(at_us)
            at_us = span.end_us
        by_axis = [by_rank[rank] for by_rank in found.exposed_axis_us.values()]
        assert sum(by_axis) == pytest.approx(found.exposed_us[rank])
        for axis, by_rank in found.exposed_axis_us.items():
            assert by_rank[rank] <= found.comm_axis_us.get(axis, (0.0,) * plan.ranks)[rank] + 1e-6
    for axis in ("pp", *dict(plan.job.axes)):
        share = found.hidden(axis)
        assert share is None or -1e-9 <= share <= 1
        assert share is None or timeline.hidden[axis] == pytest.approx(share)


@settings(max_examples=30, deadline=None)
@given(plans())
def test_lanes_carry_one_thing_at_a_time_and_every_collective_runs_once(plan: Plan) -> None:
    timeline = simulate(plan)
    for rank in range(plan.ranks):
        for axis in dict(plan.job.axes):
            spans = sorted(
                (s for s in timeline.spans if s.rank == rank and s.lane == axis), key=lambda s: s.start_us
            )
            for one, following in pairwise(spans):
                assert following.start_us >= one.end_us - 1e-6
            calls = [
                op.name
                for stage in plan.schedule.stages_of(rank)
                for op in plan.job.stages[stage].all_ops
                if op.kind is not None and op.lane == axis
            ]
            once = sum(op.name in calls for op in plan.once(rank))
            assert once
            assert len(spans) == (len(calls) - once) * plan.job.microbatches + once


@settings(max_examples=20, deadline=None)
@given(plans())
def test_collectives_that_cost_nothing_change_nothing(plan: Plan) -> None:
    """The same job whose collectives are views that take no time."""
    free = CollectiveCost(Curve(((0.0, 0.0),)))
    op_us = dict(plan.costs.op_us)
    stages = []
    for stage in plan.job.stages:
        programs = {}
        starts = {op.name: op for ops in stage.ops.values() for op in ops if op.collective is not None}
        for phase, ops in stage.ops.items():
            if phase is Phase.REDUCE_GRAD:
                programs[phase] = ops
                continue
            replaced = []
            for op in ops:
                if op.collective is not None:
                    op_us[stage.index, op.name] = 0.0
                    op = replace(op, target="aten.clone.default", args=op.args[:1])
                elif op.target == "comm.wait":
                    start = starts[op.uses[0]]
                    # What is gathered or scattered is kept until the wait; a sum has a copy.
                    kept = () if start.target == "comm.all_reduce" else start.args[:1]
                    op = replace(op, target="aten.view.default", args=(*op.args, *kept))
                replaced.append(op)
            programs[phase] = tuple(replaced)
        stages.append(replace(stage, ops=programs))
    collectives = dict.fromkeys(plan.costs.collectives, free)
    costs = replace(plan.costs, op_us=op_us, collectives=collectives, shared=(), skew=0.0)
    plan = replace(plan, costs=costs)
    without = replace(plan, job=replace(plan.job, stages=tuple(stages)))
    one, other = simulate(plan), simulate(without)
    assert one.step_us == pytest.approx(other.step_us)
    assert one.peak_bytes == other.peak_bytes
    for kind in (SpanKind.COMPUTE, SpanKind.EXPOSED):
        assert one.by_rank(kind) == pytest.approx(other.by_rank(kind))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([*FAMILIES]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.floats(0, 300),
    st.floats(0, 300),
    st.booleans(),
)
def test_slower_collectives_never_make_a_step_faster(
    family: str, stages: int, microbatches: int, first_us: float, second_us: float, sequence: bool
) -> None:
    """Where messages keep no card busy and nothing takes processors, every order in the walk is given by the
    plan, so a delay can only be handed on. (Where cards are shared, whichever comes first goes first, and a
    slower collective can let another message pass: there it need not keep.)"""
    order = make_schedule(family, stages, microbatches)
    fast, slow = sorted((first_us, second_us))
    step_us = [
        simulate(
            make_comm_plan(order, blocks=2, sequence=sequence, op_us=100, latency_us=30, collective_us=us)
        ).step_us
        for us in (fast, slow)
    ]
    assert step_us[0] <= step_us[1] + 1e-6
