"""The proof of memory: counted by hand, walked as the simulation does, and refused by its message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Arg, Op, Ref, Stage, TensorSpec
from stretto.schedule.families import FAMILIES, forward_schedule, make_schedule
from stretto.simulating import simulate
from stretto.verifying import verify
from stretto.verifying.memory import peak_bytes
from tests.synthetic import ACTIVATION, WEIGHT, WORK, make_plan
from tests.synthetic_comm import make_comm_costs, plan_with
from tests.verifying.comm_plans import comm_job, comm_plans
from tests.verifying.plans import BY_HAND, plan_of

A, W = ACTIVATION.nbytes, WEIGHT.nbytes


def test_one_stage_by_hand() -> None:
    plan = make_plan(make_schedule("1f1b", 1, 3))
    # The parameter and its gradient, and what else lives at most: h0, y0 and the loss of a later microbatch.
    # dw0 is added while it is multiplied, so beside p0 it takes nothing.
    assert peak_bytes(plan, 0) == 2 * W + 2 * A + 4


def test_gpipe_holds_every_microbatch() -> None:
    few, many = (peak_bytes(make_plan(make_schedule("gpipe", 2, m)), 0) for m in (6, 10))
    # h0 for the backward, and y0 until it has left; the number of receives that are posted ahead is the same.
    assert many - few == 4 * (A + A)


def test_views_take_nothing() -> None:
    plan = make_plan(make_schedule("1f1b", 1, 1))
    stage = plan.job.stages[0]
    forward = list(stage.ops[Phase.F])
    view = Op("v0", WORK, (Ref("y0"),), (), (ACTIVATION,), alias="y0")
    viewed = (*forward[:2], view, replace(forward[2], args=(Ref("v0"),)))
    job = replace(plan.job, stages=(Stage(0, {**stage.ops, Phase.F: viewed}),))
    window = plan.windows["0F"]
    items = (*window.items[:2], replace(window.items[0], ref="v0"), window.items[2])
    with_view = replace(plan, job=job, windows={**plan.windows, "0F": replace(window, items=items)})
    verify(with_view)
    assert peak_bytes(with_view, 0) == peak_bytes(plan, 0)


def by_hand(plan: Plan) -> list[int]:
    return [peak_bytes(plan, rank) for rank in range(plan.ranks)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*FAMILIES, *BY_HAND]), st.integers(1, 4), st.integers(1, 7))
def test_the_simulation_needs_what_is_proved(name: str, stages: int, microbatches: int) -> None:
    plan = plan_of(name, stages, microbatches)
    assert by_hand(plan) == list(simulate(plan).peak_bytes)


@settings(max_examples=40, deadline=None)
@given(comm_plans())
def test_the_simulation_needs_what_is_proved_with_collectives(plan: Plan) -> None:
    """Where ops wait at once, no value lives longer because it is being sent."""
    assert by_hand(plan) == list(simulate(plan).peak_bytes)


def test_what_is_sent_is_held_until_the_wait() -> None:
    def op(name: str, *args: Arg, target: str = WORK, spec: TensorSpec = ACTIVATION) -> Op:
        alias = "s" if target == "comm.wait" else None
        return Op(name, target, args, (), (spec,), alias)

    half = TensorSpec((ACTIVATION.shape[0] // 2, *ACTIVATION.shape[1:]), ACTIVATION.dtype)
    forward = (
        op("a", Ref("batch/x")),
        op("s", Ref("a"), "sum", "tp", 2, target="comm.reduce_scatter", spec=half),
        op("b", Ref("batch/x")),
        op("w", Ref("s"), target="comm.wait", spec=half),
        op("lp", Ref("w"), Ref("b"), spec=TensorSpec((), "float32")),
        op("ls", Ref("lp"), "sum", "tp", 2, target="comm.all_reduce", spec=TensorSpec((), "float32")),
        replace(op("loss", Ref("ls"), target="comm.wait", spec=TensorSpec((), "float32")), alias="ls"),
    )
    stage = Stage(0, {Phase.F: forward, Phase.I: (), Phase.W: ()})
    job = replace(comm_job(1, 1, (("tp", 2),)), stages=(stage,), parameters=())
    plan = plan_with(job, forward_schedule(1, 1), make_comm_costs(job))
    verify(plan)
    assert peak_bytes(plan, 0) == A + A // 2 + A  # a, s and b; a goes after the wait


def test_a_limit_is_kept_or_refused() -> None:
    plan = make_plan(make_schedule("gpipe", 2, 4))
    peaks = by_hand(plan)
    verify(plan, max_bytes=max(peaks))
    with pytest.raises(PlanError) as caught:
        verify(plan, max_bytes=max(peaks) - 1)
    [fault] = caught.value.faults
    rank = peaks.index(max(peaks))
    assert str(fault).startswith(f"rank {rank}, run {rank}")
    limit = max(peaks) - 1
    assert f"keeps {limit + 1:,} bytes, 1 more than the limit of {limit:,}; with the" in str(fault)
    assert "the optimizer's state (sgd). Use a schedule" in str(fault)
