"""The walk's cost is in communications: a step of a million ops is simulated and bounded in seconds."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from stretto.ir.program import Job, Op, Ref
from stretto.schedule.families import make_schedule
from stretto.simulating import predict, simulate
from tests.synthetic_comm import ACTIVATION, make_comm_costs, make_comm_job, plan_with

LIMIT_S = 15.0
"""Processor time for the walk. It takes about 1.2 s on a core of 2.6 GHz."""


def with_more_ops(job: Job, each: int) -> Job:
    """The job with `each` ops after every op that computes an activation; nothing reads them."""
    stages = []
    for stage in job.stages:
        programs = {}
        for phase, ops in stage.ops.items():
            made: list[Op] = []
            for op in ops:
                made.append(op)
                if not op.target.startswith("comm.") and op.outputs == (ACTIVATION,):
                    extra = (f"{op.name}_{k}" for k in range(each))
                    made += [Op(n, "aten.mm.default", (Ref(op.name),), (), (ACTIVATION,)) for n in extra]
            programs[phase] = tuple(made)
        stages.append(replace(stage, ops=programs))
    return replace(job, stages=tuple(stages))


@pytest.mark.slow
def test_a_million_ops() -> None:
    pp_ranks, microbatches = 16, 64
    job = with_more_ops(make_comm_job(pp_ranks, microbatches, axes=(("dp", 2), ("tp", 2)), blocks=12), 20)
    costs = make_comm_costs(job, op_us=10, latency_us=5, bytes_per_us=1e4, slowdown=0.1, shared=("dp", "tp"))
    plan = plan_with(job, make_schedule("1f1b", pp_ranks, microbatches), costs)
    programs = [op for ops in job.stages[0].ops.values() for op in ops]
    assert len(programs) * pp_ranks * microbatches > 10**6
    assert sum(op.collective is not None for op in programs) == 24
    began = time.process_time()
    timeline = simulate(plan)
    walked = time.process_time()
    predict(plan, timeline)
    assert walked - began < LIMIT_S
    assert time.process_time() - walked < LIMIT_S
