"""A plan with all-to-alls: proved, simulated and run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.timeline import SpanKind
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.price.shared import wanted_collectives
from stretto.report.tables import communication_of
from stretto.runtime.local import run_threads
from stretto.runtime.runner import Runner
from stretto.simulating import simulate
from stretto.verifying import verify
from tests.clusters import cores
from tests.exchange_job import Products, batch_of, exchange_job
from tests.verifying.edits import op

Grads = dict[str, torch.Tensor]

CASES = ((1, 2), pytest.param(2, 2, marks=pytest.mark.slow), (2, 3))


def plan_of(stages: int, tp: int) -> Plan:
    job = exchange_job(stages, tp=tp)
    costs = described_costs(job, cores(latency_us=20.0, link_gbps=0.05))
    return make_plan(job, costs, schedule="1f1b")


def step(runner: Runner) -> tuple[float, Grads]:
    """The step's loss, and this rank's parts of gradients."""
    loss = float(runner.step({"x": batch_of(runner.plan.job)}))
    return loss, {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}


def on_threads(plan: Plan) -> list[tuple[float, Grads]]:
    return run_threads(plan, lambda _: Products(len(plan.job.stages)), step)


@pytest.mark.parametrize(("stages", "tp"), CASES)
def test_it_gives_the_values_of_the_plain_model(stages: int, tp: int) -> None:
    plan = plan_of(stages, tp)
    loss, grads = Products(stages).expected(batch_of(plan.job).chunk(plan.job.microbatches))
    for rank, (told, parts) in enumerate(on_threads(plan)):
        assert told == pytest.approx(float(loss), rel=1e-12)
        assert set(parts) == {f"up{rank // tp}", f"down{rank // tp}"}
        for name, part in parts.items():
            full = grads[name]
            own = full.chunk(tp, int(name.startswith("up")))[rank % tp]
            torch.testing.assert_close(part, own, rtol=1e-12, atol=float(full.abs().max()) * 1e-13)


@pytest.mark.parametrize(("stages", "tp"), CASES)
def test_the_simulation_counts_it(stages: int, tp: int) -> None:
    plan = plan_of(stages, tp)
    verify(plan)
    assert ("tp", "all_to_all") in plan.costs.collectives
    spans = [s for s in simulate(plan).spans if communication_of(s.name) == ("tp", "all_to_all")]
    there = [span for span in spans if span.kind is SpanKind.MESSAGE]
    assert len(there) == 4 * stages * plan.job.microbatches  # there and back, forward and backward
    (wanted,) = (w for w in wanted_collectives(plan.job) if w.kind == "all_to_all")
    curve = plan.costs.collectives["tp", "all_to_all"].curve
    for span in there:
        assert span.duration_us >= curve.us(span.nbytes) * 0.999
        assert span.nbytes in wanted.sizes


def test_rows_that_have_no_equal_parts_are_refused() -> None:
    plan = plan_of(1, 2)
    spec = next(o for o in plan.job.stages[0].ops[Phase.F] if o.name == "h0").outputs[0]
    assert spec is not None
    odd = replace(spec, shape=(11, *spec.shape[1:]))
    with pytest.raises(PlanError, match=r"the all_to_all of h0, .*, over 2 ranks, is none"):
        verify(op(0, "h0", outputs=(odd,))(plan))
