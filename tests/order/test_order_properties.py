"""Any job, layout, schedule and costs: what planning makes in any mode is proved, and never predicted to be
slower than waiting at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.ir.stage_maps import virtual_stages_of
from stretto.planning.choose import communicates
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import FAMILIES
from stretto.verifying import verify
from tests.synthetic_comm import make_comm_costs
from tests.verifying.comm_plans import AXES, comm_job

TIMES = st.sampled_from([0.0, 1.0, 30.0, 100.0, 250.0, 1000.0])


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_what_planning_makes_is_proved(data: st.DataObject) -> None:
    check(data)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(st.data())
def test_what_planning_makes_of_many_jobs_is_proved(data: st.DataObject) -> None:
    check(data)


def check(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(AXES))
    family = data.draw(st.sampled_from(sorted(FAMILIES)))
    each = virtual_stages_of(family, None)
    job = comm_job(
        data.draw(st.integers(1, 4 // each)) * each,
        data.draw(st.integers(1, 6)),
        axes,
        blocks=data.draw(st.integers(1, 3)),
        sequence=data.draw(st.booleans()),
        tied=data.draw(st.booleans()),
    )
    costs = make_comm_costs(
        job,
        op_us=data.draw(TIMES),
        start_us=data.draw(st.sampled_from([0.0, 5.0])),
        collective_us=data.draw(TIMES),
        latency_us=data.draw(TIMES),
        slowdown=data.draw(st.sampled_from([0.0, 0.3])),
        shared=tuple(axis for axis, _ in axes if data.draw(st.booleans())),
    )
    off = make_plan(job, costs, schedule=family, overlap="off")
    assert off.prediction is not None
    for mode in ("local", "window"):
        plan = make_plan(job, costs, schedule=family, overlap=mode, order="list")
        verify(plan)
        assert plan.prediction is not None
        if communicates(job):
            assert plan.prediction.step_us <= off.prediction.step_us * (1 + 1e-9)
