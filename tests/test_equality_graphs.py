"""Any edge between stages: random models, cut anywhere, on ranks that have any stages, are the plain model.

Skips over any number of stages, values that several stages read, parameters of several stages, gradients
that sum what several stages give, integers, booleans, one number, half precision, slices, leaves of the batch
at any stage (`tests.random_stages`). In float64 within 1e-10 for every family, and bit by bit between them.
This file is also the program that processes run.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from stretto.capturing.split import place
from stretto.capturing.stages import cut
from stretto.capturing.trace import trace
from stretto.ir.action import Phase, Schedule
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.ir.serialize import load_plan
from stretto.planning.make_plan import make_plan
from stretto.runtime import Runner
from tests.families import ONE_STAGE
from tests.random_stages import SPECIAL, Anywhere, all_kinds, batch_of, draw_model, loss_of, one_read_late
from tests.runtime.equality import (
    assert_equal,
    assert_same_bits,
    gather,
    job_of,
    made_up_costs,
    plain,
    run,
)
from tests.runtime.launch import launch
from tests.verifying.random_programs import random_schedule

FAST = 5
SEEDS = 200


@cache
def drawn(seed: int) -> tuple[Anywhere, Job, tuple[Schedule | str, ...]]:
    """The model, its job, and schedules: all families, then a walk over what can run on ranks that have any
    stages; in the fast form one of these."""
    draw = Random(f"stages {seed}")
    model = draw_model(draw)
    microbatches = draw.randint(1, 4)
    found = trace(model, batch_of(2 * microbatches), loss_of, microbatches=microbatches)
    origins = [origin for _, origin in found.program.ops]
    at = sorted({origin.segment for origin in origins if not origin.backward and origin.segment})
    stages = draw.randint(2, min(6, len(at) + 1))
    job = cut(found, place(found, stages, sorted(draw.sample(at, stages - 1))), stages, microbatches)
    walk = random_schedule(draw, stages, microbatches, draw.randint(2, stages))
    if seed < FAST:
        return model, job, (walk if seed % 2 else draw.choice(ONE_STAGE),)
    return model, job, (*ONE_STAGE, walk)


def crossing(plan: Plan) -> list[str]:
    """Values that are sent from rank to rank and are not in one piece."""
    return [
        str(edge)
        for edge in plan.job.edges
        if plan.rank_of(edge.source) != plan.rank_of(edge.target) and edge.spec.stride is not None
    ]


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < FAST else [pytest.mark.slow]) for s in range(SEEDS)]
)
def test_any_graph_of_stages_equals_the_plain_model(seed: int) -> None:
    model, job, schedules = drawn(seed)
    batch = batch_of(2 * job.microbatches)
    expected = plain(model, batch, loss_of)
    results = []
    for schedule in schedules:
        plan = make_plan(job, made_up_costs(job), schedule=schedule)
        assert crossing(plan) == []
        results.append(run(plan, model, batch))
        assert_equal(results[-1], expected, 1e-10)
    for result in results[1:-1]:
        assert_same_bits(result, results[0])


def test_a_value_that_only_a_backward_reads_is_sent_to_that() -> None:
    model = one_read_late()
    found = trace(model, batch_of(4), loss_of, microbatches=2)
    origins = [origin for _, origin in found.program.ops]
    at = sorted({origin.segment for origin in origins if not origin.backward and origin.segment})
    job = cut(found, place(found, len(at) + 1, at), len(at) + 1, 2)
    assert [f"{edge.source}{edge.phase}>{edge.target}{edge.user_phase}" for edge in job.edges].count(
        "2F>4I"
    ) == 1
    for family in ("gpipe", "zb-h2"):
        result = run(make_plan(job, made_up_costs(job), schedule=family), model, batch_of(4))
        assert_equal(result, plain(model, batch_of(4), loss_of), 1e-10)


@cache
def plan_of_all_kinds() -> tuple[Anywhere, Plan]:
    """Two stages, between which values of all kinds cross at once."""
    model, first = all_kinds()
    found = trace(model, batch_of(4), loss_of, microbatches=2)
    job = job_of(found, 2, 2, [first])
    return model, make_plan(job, made_up_costs(job), schedule="1f1b")


def test_all_kinds_of_values_cross_one_border() -> None:
    model, plan = plan_of_all_kinds()
    forward = [edge for edge in plan.job.edges if edge.phase is Phase.F]
    assert len(forward) >= len(SPECIAL)
    kinds = {edge.spec.dtype for edge in forward}
    assert kinds == {"float64", "float32", "bfloat16", "int64", "int8", "bool"}
    assert any(edge.spec.shape == () for edge in forward)
    assert crossing(plan) == []
    assert_equal(run(plan, model, batch_of(4)), plain(model, batch_of(4), loss_of), 1e-10)


def launched(folder: Path) -> None:
    """One rank of two."""
    dist.init_process_group("gloo")
    model, _ = all_kinds()
    runner = Runner(load_plan(folder / "plan.json"), model)
    loss = runner.step(batch_of(4))
    grads = {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}
    torch.save((loss, grads), folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_all_kinds_of_values_cross_between_processes(tmp_path: Path) -> None:
    model, plan = plan_of_all_kinds()
    plan.save(tmp_path / "plan.json")
    launch(2, "tests.test_equality_graphs", str(tmp_path))
    found = gather(model, [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)])
    assert_equal(found, plain(model, batch_of(4), loss_of), 1e-10)
    assert_same_bits(found, run(plan, model, batch_of(4)))


if __name__ == "__main__":
    launched(Path(sys.argv[1]))
