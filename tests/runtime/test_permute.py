"""A step in which each rank sends a tensor to the next one of an axis, captured and by hand.

It is priced, planned, proved, simulated, run on threads and on processes, and rehearsed. This file is also
the program that the processes run.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.collectives import PERMUTE_NEXT, PERMUTE_PREVIOUS
from stretto.ir.plan import Plan
from stretto.ir.serialize import load_plan
from stretto.ir.timeline import SpanKind
from stretto.parallelize import ops
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.report.tables import communication_of
from stretto.runtime.local import run_threads
from stretto.runtime.rehearse import rehearse
from stretto.simulating import simulate
from stretto.verifying import verify
from tests.clusters import cores
from tests.exchange_job import Products, batch_of, exchange_job
from tests.runtime.launch import launch
from tests.verifying.edits import op

SIZE, ROWS, MICROBATCHES = 5, 3, 2
"""Rows of a rank's microbatch are no multiple of the ranks."""

LATENCY_US, BYTES_PER_US = 2000.0, 50.0
CLUSTER = cores(latency_us=LATENCY_US, link_gbps=BYTES_PER_US / 1e3)
CLOSE = {"rtol": 1e-12, "atol": 1e-14}

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


class Neighbours(nn.Module):
    """What each rank makes, times what the rank before it has made."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(SIZE, SIZE, dtype=torch.float64)
        self.ranks = ranks

    def made(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.made(x)
        return h * ops.exchange(h.sin(), "dp", self.ranks, PERMUTE_NEXT)


def batch(ranks: int) -> torch.Tensor:
    rows = ranks * MICROBATCHES * ROWS
    return torch.sin(torch.arange(float(rows * SIZE), dtype=torch.float64)).reshape(rows, SIZE)


@cache
def captured(ranks: int) -> Plan:
    parallel = stretto.Parallel(dp=ranks, microbatches=MICROBATCHES, schedule="1f1b")
    job = stretto.capture(Neighbours(ranks), batch(ranks), lambda m, x: m(x).square().mean(), parallel)
    return stretto.plan(job, cluster=CLUSTER)


def expected(ranks: int) -> Result:
    """By autograd, of all ranks' rows in one process."""
    model = Neighbours(ranks)
    made = model.made(batch(ranks)).reshape(ranks, MICROBATCHES * ROWS, SIZE)
    loss = torch.stack([made[k] * made[k - 1].sin() for k in range(ranks)]).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(runner: stretto.Runner, given: Any) -> Result:
    loss = runner.step(given)
    return loss, {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}


def assert_expected(results: list[Result], ranks: int) -> None:
    assert len(results) == ranks
    for result in results:
        torch.testing.assert_close(result, expected(ranks), **CLOSE)


def test_it_is_captured_with_its_gradient() -> None:
    plan = captured(3)
    starts = {
        phase: [o for o in plan.job.stages[0].ops[phase] if o.target.startswith("comm.permute")]
        for phase in (Phase.F, Phase.I, Phase.W)
    }
    forward = [o.target for o in starts[Phase.F]]
    assert forward == [PERMUTE_NEXT.target]
    assert [o.target for o in (*starts[Phase.I], *starts[Phase.W])] == [PERMUTE_PREVIOUS.target]
    assert [str(spec) for o in starts[Phase.F] for spec in o.outputs] == [f"float64[{ROWS},{SIZE}]"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_threads_compute_what_one_process_computes(ranks: int) -> None:
    plan = captured(ranks)
    verify(plan)
    models = [Neighbours(ranks) for _ in range(ranks)]  # not in the threads, which share one generator
    results = run_threads(plan, lambda rank: models[rank], lambda runner: step(runner, batch(ranks)))
    assert_expected(results, ranks)


def test_processes_compute_what_one_process_computes(tmp_path: Path) -> None:
    captured(3).save(tmp_path / "plan.json")
    launch(3, "tests.runtime.test_permute", str(tmp_path))
    assert_expected([torch.load(tmp_path / f"{rank}.pt") for rank in range(3)], 3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_costs_one_message_and_takes_that_in_the_simulation(ranks: int) -> None:
    plan = captured(ranks)
    nbytes = ROWS * SIZE * 8
    us = LATENCY_US + nbytes / BYTES_PER_US
    assert plan.costs.collectives["dp", "permute_next"].curve.us(nbytes) == pytest.approx(us)
    assert ("dp", "permute_previous") not in plan.costs.collectives, "they share a curve"
    spans = [s for s in simulate(plan).spans if communication_of(s.name) == ("dp", "permute_next")]
    there = [span for span in spans if span.kind is SpanKind.MESSAGE]
    assert len(there) == 2 * MICROBATCHES, "forward and backward"
    for span in there:
        assert span.nbytes == nbytes
        assert span.duration_us >= us * 0.999
    assert min(span.duration_us for span in there) == pytest.approx(us, rel=0.01)


@pytest.mark.quiet
def test_a_rehearsed_rank_takes_what_its_permutations_take() -> None:
    plan = captured(3)
    for rank in range(3):
        found = rehearse(plan, rank, model=Neighbours(3), batch=batch(3), steps=1)
        there = [s for s in found.timeline.spans if communication_of(s.name) == ("dp", "permute_next")]
        assert len([s for s in there if s.kind is SpanKind.MESSAGE]) == 2 * MICROBATCHES
        assert plan.prediction is not None
        assert found.exposed_us["dp"] > 0.85 * plan.prediction.exposed_axis_us["dp"][0]


@pytest.mark.parametrize(("stages", "tp"), [(1, 2), (2, 3)])
def test_there_and_back_along_tp_gives_the_values_of_the_plain_model(stages: int, tp: int) -> None:
    job = exchange_job(stages, tp=tp, kind=PERMUTE_NEXT)
    plan = make_plan(job, described_costs(job, CLUSTER), schedule="1f1b")
    verify(plan)
    given = batch_of(job)
    loss, grads = Products(stages).expected(given.chunk(job.microbatches))
    results = run_threads(plan, lambda _: Products(stages), lambda runner: step(runner, {"x": given}))
    for rank, (reported, parts) in enumerate(results):
        torch.testing.assert_close(reported, loss, **CLOSE)
        for name, part in parts.items():
            own = grads[name].chunk(tp, int(name.startswith("up")))[rank % tp]
            torch.testing.assert_close(part, own, rtol=1e-12, atol=float(own.abs().max()) * 1e-12)


def test_another_shape_than_what_was_sent_is_refused() -> None:
    job = exchange_job(1, kind=PERMUTE_NEXT)
    plan = make_plan(job, described_costs(job, CLUSTER), schedule="1f1b")
    sent = next(o for o in job.stages[0].ops[Phase.F] if o.name == "h0_there_start")
    assert sent.outputs[0] is not None
    wrong = replace(sent.outputs[0], shape=(6, 12))
    with pytest.raises(PlanError, match=r"the permute_next of h0, .* is \[12, 12\] of float64"):
        verify(op(0, "h0_there_start", outputs=(wrong,))(plan))


def _launched(folder: Path) -> None:
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    runner = stretto.Runner(load_plan(folder / "plan.json"), Neighbours(ranks))
    torch.save(step(runner, batch(ranks)), folder / f"{rank}.pt")
    runner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    _launched(Path(sys.argv[1]))
