"""Variants: what is tried is taken where it is faster, and where it can be done; beginnings are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stretto
from stretto.errors import PlanError
from stretto.ir.plan import Plan
from stretto.ir.program import Op
from stretto.passes import STEP_PASSES, OfStep
from stretto.passes.step import Context, LeftOutError, Step
from stretto.planning import choose
from tests.clusters import cores
from tests.price.comm_job import comm_job
from tests.verifying.meaning import meaning
from tests.verifying.random_programs import random_program
from tests.verifying.reference import runs

CLUSTER = cores(peak_tflops=1e-06, op_overhead_us=1.0)


def times(step: Step, factor: float) -> Step:
    """The step with other arithmetic in its products."""

    def of(ops: tuple[Op, ...]) -> tuple[Op, ...]:
        return tuple(replace(op, flops=int(op.flops * factor)) if op.flops else op for op in ops)

    job = step.job
    stages = (replace(s, ops={phase: of(ops) for phase, ops in s.ops.items()}) for s in job.stages)
    return replace(step, job=replace(job, stages=tuple(stages)))


def plan_with(monkeypatch: pytest.MonkeyPatch, *more: OfStep, overlap: str = "local") -> Plan:
    job = comm_job(2, tp=2, rows=32, hidden=64)
    monkeypatch.setattr(choose, "STEP_PASSES", (*more, *STEP_PASSES))
    return stretto.plan(job, CLUSTER, schedule="1f1b", overlap=overlap)  # type: ignore[arg-type]


def flops(plan: Plan) -> int:
    return sum(op.flops for s in plan.job.stages for ops in s.ops.values() for op in ops)


@pytest.mark.parametrize("overlap", ["off", "local", "window"])
def test_what_is_tried_is_taken_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    plain = plan_with(monkeypatch, overlap=overlap)
    less = plan_with(monkeypatch, OfStep(lambda step, _: times(step, 0.5), tried=True), overlap=overlap)
    more = plan_with(monkeypatch, OfStep(lambda step, _: times(step, 2.0), tried=True), overlap=overlap)
    assert flops(less) == flops(plain) // 2
    assert less.prediction is not None
    assert plain.prediction is not None
    assert less.prediction.step_us < plain.prediction.step_us, "and its ops are priced as what they are now"
    assert more == plain


@pytest.mark.parametrize("error", [LeftOutError("no"), PlanError("no", ["none"])])
def test_what_cannot_be_done_is_done_without(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuses(step: Step, context: Context) -> Step:
        raise error

    assert plan_with(monkeypatch, OfStep(refuses, tried=True)) == plan_with(monkeypatch)
    with pytest.raises(type(error)):
        plan_with(monkeypatch, OfStep(refuses))


def test_what_stops_in_a_searched_order_is_no_variant() -> None:
    """Pairs of this V go on in the order of a list, and wait for each other in the order that is searched."""
    program = random_program(278)
    plan = program.plan()
    assert plan.overlap == "local"
    assert runs(plan) == meaning(program.job, program.schedule.stage_ranks)
