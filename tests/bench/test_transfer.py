"""A cell predicted from others: exact where the others are the same, near where they are alike."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import stretto
from stretto.bench.kept import keep_run
from stretto.bench.predict import (
    MOST_TIMES,
    SHAPES,
    Cell,
    Found,
    Shape,
    cell_from,
    grid,
    known,
    run_cell,
    uncertainty,
)
from stretto.bench.predict_grid import bits_per_s, is_calibrated
from stretto.bench.transfer import all_reduces, transferred
from stretto.bench.visits import calibration_of
from stretto.ir.costs import CollectiveCost
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT, Job
from stretto.ir.serialize import load_plan
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.price.calibration import Calibration
from stretto.report.rundir import load_run


@functools.cache
def job_of(layers: int, hidden: int, sequence_parallel: bool = False) -> Job:
    model = GPT(GPTConfig(vocab_size=64, layers=layers, hidden=hidden, heads=4, context=16))
    batch = {key: torch.zeros(4, 16, dtype=torch.int64) for key in ("input_ids", "labels")}
    parallel = stretto.Parallel(pp=2, tp=2, sequence_parallel=sequence_parallel, microbatches=2)
    return stretto.capture(model, batch, next_token_loss, parallel)


@functools.cache
def plan_of(layers: int, hidden: int, bytes_per_us: float, sequence_parallel: bool = False) -> Plan:
    job = job_of(layers, hidden, sequence_parallel)
    cluster = stretto.Cluster(link_bytes_per_us=bytes_per_us, latency_us=50.0)
    costs = stretto.plan(job, cluster, overlap="off").costs
    curve = Curve(((0.0, 50.0), (1e6, 50.0 + 1e6 / bytes_per_us)))
    kinds = {("tp", kind): CollectiveCost(curve) for kind in ("all_reduce", "reduce_scatter", "all_gather")}
    return make_plan(job, replace(costs, collectives=kinds), overlap="local")


def ops_of(*plans: Plan) -> Calibration:
    return calibration_of([(plan.job, plan.costs.op_us) for plan in plans])


def test_the_same_shape_at_a_known_rate_is_what_was_known() -> None:
    plan = plan_of(2, 32, 10.0)
    found = transferred(plan, 8e7, ops_of(plan), {8e7: [plan], math.inf: [plan_of(2, 32, 1e4)]})
    assert plan.prediction is not None
    assert found.prediction is not None
    assert found.prediction.step_us == pytest.approx(plan.prediction.step_us, rel=0.02)


def test_ranks_are_as_uneven_as_those_that_communicate_alike() -> None:
    whole = plan_of(2, 32, 10.0)
    parts = plan_of(2, 32, 10.0, sequence_parallel=True)
    assert all_reduces(whole.job)
    assert not all_reduces(parts.job)

    def uneven(plan: Plan, skew: float, lost_us: float) -> Plan:
        kinds = {key: replace(cost, processor_us=lost_us) for key, cost in plan.costs.collectives.items()}
        return replace(plan, costs=replace(plan.costs, skew=skew, collectives=kinds))

    known = {8e7: [uneven(whole, 0.1, 50.0), uneven(parts, 0.3, 90.0)], math.inf: [whole]}
    for plan, skew, lost_us in ((whole, 0.1, 50.0), (parts, 0.3, 90.0)):
        costs = transferred(plan, 8e7, ops_of(plan), known).costs
        assert costs.skew == pytest.approx(skew)
        assert all(cost.processor_us == pytest.approx(lost_us) for cost in costs.collectives.values())
    # Of those that there are.
    found = transferred(parts, 8e7, ops_of(parts), {8e7: [uneven(whole, 0.1, 50.0)]})
    assert found.costs.skew == pytest.approx(0.1)


def test_starts_and_waits_take_what_they_took_elsewhere() -> None:
    small, large, between = plan_of(2, 32, 10.0), plan_of(2, 64, 10.0), plan_of(2, 48, 10.0)

    def timed(plan: Plan) -> Plan:
        """A start takes 300 us and 0.01 us a byte, a wait 100 us."""
        times = dict(plan.costs.op_us)
        for stage in plan.job.stages:
            for op in (op for ops in stage.ops.values() for op in ops):
                if op.collective is not None:
                    times[stage.index, op.name] = 300.0 + 0.01 * op.collective.nbytes
                elif op.target == WAIT:
                    times[stage.index, op.name] = 100.0
        return replace(plan, costs=replace(plan.costs, op_us=times))

    known = [timed(small), timed(large)]
    found = transferred(between, 8e7, ops_of(*known), {8e7: known}).costs.op_us
    wanted = timed(between).costs.op_us
    calls = [
        (stage.index, op.name)
        for stage in between.job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.collective is not None or op.target == WAIT
    ]
    assert calls
    assert {key: found[key] for key in calls} == pytest.approx({key: wanted[key] for key in calls})


@pytest.mark.slow
def test_another_shape_and_rate_lies_near() -> None:
    target = plan_of(3, 48, 20.0)
    known = {rate: [plan_of(2, 32, rate / 8e6), plan_of(2, 64, rate / 8e6)] for rate in (8e7, 8e8)}
    found = transferred(target, 1.6e8, ops_of(*known[8e8]), known)
    assert target.prediction is not None
    assert found.prediction is not None
    assert found.prediction.step_us == pytest.approx(target.prediction.step_us, rel=0.1)
    assert "transferred" in found.costs.source


@pytest.mark.slow
def test_ops_of_equal_signature_have_one_time() -> None:
    one, other = plan_of(2, 32, 10.0), plan_of(3, 32, 10.0)
    ops = ops_of(one).ops
    assert ops.keys() == ops_of(one, other).ops.keys(), "another layer has no new op"
    assert any(key.startswith("aten.mm.default(float32[") for key in ops)


def test_the_grid_has_every_layout_and_rates_that_were_not_calibrated() -> None:
    cells = grid()
    assert {(c.pp, c.tp) for c in cells} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert {c.rate for c in cells if not is_calibrated(c)} >= {"50mbit", "200mbit"}
    assert {c.shape for c in cells if is_calibrated(c)} < set(SHAPES)
    assert {c.sequence_parallel for c in cells if c.tp == 2 and is_calibrated(c)} == {False, True}
    assert bits_per_s("unlimited") == math.inf
    assert bits_per_s("50mbit") == 5e7


def test_a_cell_is_predicted_by_what_its_ops_took_between_steps(tmp_path: Path) -> None:
    shape = Shape("tiny", hidden=32, layers=1, heads=2, sequence=8, vocab=64, microbatch=1, microbatches=2)
    found, _ = run_cell(Cell(shape, 1, 1, "unlimited"), 3, partial(keep_run, tmp_path / "cell"))
    run = load_run(tmp_path / "cell")
    assert run.plan is not None
    assert run.measured is not None
    plan, planned = run.plan, load_plan(tmp_path / "cell" / "planned.json")
    assert plan.prediction is not None
    assert planned.prediction is not None
    assert planned.prediction.step_us / 1e3 == pytest.approx(found.planned_ms)
    assert planned.windows == plan.windows, "the order that was made is the one that ran"
    assert min(found.rounds_ms) < run.measured.step_us / 1e3 * 1.5
    assert found.predicted_ms == pytest.approx(plan.prediction.step_us / 1e3)
    assert found.planned_ms != found.predicted_ms, "ops took another time when the plan was made"
    assert 3 <= len(found.rounds_ms) <= 3 * MOST_TIMES
    assert found.peak_measured == pytest.approx(plan.prediction.peak_bytes, rel=0.01)


def test_steps_go_on_until_their_mean_is_known() -> None:
    assert uncertainty([100.0]) == math.inf, "one step tells nothing of others"
    assert uncertainty([100.0, 100.0, 100.0]) == 0.0
    # Four steps ten percent off on either side: 11.5 of 100 over the root of four.
    assert uncertainty([90.0, 110.0, 110.0, 90.0]) == pytest.approx(0.0577, abs=1e-4)
    steady, unsteady = [[100.0, 101.0]] * 20, [[90.0, 110.0]] * 20
    assert known(steady, [[5.0]] * 40)
    assert known(unsteady, [[5.0]] * 40)
    assert not known(steady, [[4.0], [6.0]] * 20), "ops that differ make a prediction unsure, too"
    assert not known(unsteady[:14], [[4.8], [5.2]] * 5), "each would be known alone"
    assert known(unsteady[:14], [[5.0]] * 40)
    assert not known([[100.0]], [[5.0]])
    one_place = [[5.0, 4.0], [5.0, 6.0]] * 20
    assert not known(steady, one_place), "one place alone, of which the mean over all would hide half"


def test_figures_of_a_cell() -> None:
    found = Found("a", 90.0, 110.0, 100.0, (100.0,), 0.25, 0.2, (105, 90), (100, 100))
    assert found.error == pytest.approx(0.1)
    assert found.exposed_points == pytest.approx(5.0)
    assert found.peak_error == pytest.approx(-0.1)
    cell = Cell(SHAPES[0], 2, 2, "50mbit")
    assert cell_from(asdict(cell)) == cell
    assert str(cell) == "wide pp=2 tp=2 50mbit"
