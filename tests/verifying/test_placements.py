"""Plans whose tensor-parallel programs were damaged: what ranks have does not fit any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT, Op, Ref
from stretto.passes.rewrite import with_uses
from stretto.verifying import plan_faults
from tests.clusters import cores

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    parallel = stretto.Parallel(tp=2)
    styles = {"1": "colwise", "3": "rowwise"}
    job = stretto.capture(model, torch.randn(4, 8), loss=loss, parallel=parallel, tp_plan=styles)
    return stretto.plan(job, cluster=cores(), order="list")


def changed(plan: Plan, change: Callable[[Op], Op]) -> Plan:
    """The plan with another op in the place of each."""
    stages = tuple(
        replace(stage, ops={phase: tuple(map(change, ops)) for phase, ops in stage.ops.items()})
        for stage in plan.job.stages
    )
    return replace(plan, job=replace(plan.job, stages=stages))


def first(plan: Plan, target: str) -> Op:
    return next(op for s in plan.job.stages for ops in s.ops.values() for op in ops if op.target == target)


def test_what_planning_makes_is_accepted(plan: Plan) -> None:
    assert plan_faults(plan) == []


def test_an_addend_that_is_used_as_the_sum(plan: Plan) -> None:
    start = first(plan, "comm.all_reduce")
    wait = next(
        op.name
        for s in plan.job.stages
        for ops in s.ops.values()
        for op in ops
        if op.target == WAIT and op.args == (Ref(start.name),)
    )
    partial_sum = start.args[0].name
    broken = changed(
        plan,
        lambda op: (
            op if op.name in (wait, start.name) else with_uses(op, lambda u: partial_sum if u == wait else u)
        ),
    )
    faults = " ".join(map(str, plan_faults(broken)))
    assert "of which every rank has only a partial sum" in faults or "differs between tp ranks" in faults


def test_a_gradient_that_is_not_held_as_its_parameter(plan: Plan) -> None:
    parameters = tuple(
        replace(p, partial=("tp",)) if p.name == "0.weight" else p for p in plan.job.parameters
    )
    faults = plan_faults(replace(plan, job=replace(plan.job, parameters=parameters)))
    assert any("0.weight" in str(fault) for fault in faults)


def test_a_shard_that_the_program_does_not_have(plan: Plan) -> None:
    """Columns in the place of rows: the product would be of slices that do not belong together."""
    parameters = tuple(
        replace(p, shards=(replace(p.shards[0], dim=1 - p.shards[0].dim),)) if p.name == "3.weight" else p
        for p in plan.job.parameters
    )
    faults = plan_faults(replace(plan, job=replace(plan.job, parameters=parameters)))
    assert any("that ranks do not keep alike" in str(fault) for fault in faults)
