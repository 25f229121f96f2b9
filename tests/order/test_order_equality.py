"""Overlap never changes numbers: losses and gradients of every mode are those of `off`, to the bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.costs import CollectiveCost, Costs
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT, Job
from stretto.ir.transfers import is_free
from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.runtime.local import run_threads
from stretto.runtime.runner import Runner
from tests.parallelize.equality import (
    MODELS,
    ROWS,
    assert_plan_is_plain,
    batch_of,
    gpt,
    loss_of,
)
from tests.runtime.equality import made_up_costs

KINDS = ("all_reduce", "all_gather", "reduce_scatter")


COLLECTIVE_US = 100.0
"""Long enough for windows to gain what lets them come first (`stretto.planning.choose.WORTH`)."""


def costs_of(job: Job) -> Costs:
    """Made-up costs under which collectives take about as long as compute, and waits and views nothing."""
    costs = made_up_costs(job)
    free = {
        (stage.index, op.name)
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
        if is_free(op) or op.target == WAIT
    }
    op_us = {key: us for key, us in costs.op_us.items() if key not in free}
    curve = Curve(((0.0, COLLECTIVE_US),))
    found = {(axis, kind): CollectiveCost(curve) for axis, _ in job.axes for kind in KINDS}
    return replace(costs, op_us=op_us, collectives=found, action_us=0.0)


Numbers = list[tuple[Tensor, dict[str, Tensor]]]


def numbers(plan: Plan, model: nn.Module, batch: dict[str, Tensor] | None = None) -> Numbers:
    """Loss and gradients of every rank."""

    def work(runner: Runner) -> tuple[Tensor, dict[str, Tensor]]:
        loss = runner.step(batch_of() if batch is None else batch)
        return loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}

    return run_threads(plan, lambda _: copy.deepcopy(model), work)


def assert_same(made: Numbers, expected: Numbers) -> None:
    """To the bit."""
    for (loss, grads), (want_loss, want) in zip(made, expected, strict=True):
        assert torch.equal(loss, want_loss)
        assert grads.keys() == want.keys()
        for parameter, grad in grads.items():
            assert torch.equal(grad, want[parameter]), parameter


LAYOUTS = (
    {"tp": 2, "microbatches": 4},
    {"tp": 2, "sequence_parallel": True, "microbatches": 4},
    {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "1f1b"},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "microbatches": 4, "schedule": "zb-h1"},
)

CELLS = [
    pytest.param(
        layout,
        tied,
        # A tie is one more sum between stages. What the other layouts have beside that is in
        # `tests/runtime/test_buffers.py`, too.
        marks=() if tied and layout.get("schedule") == "1f1b" else pytest.mark.slow,
        id=" ".join(["tied" if tied else "untied", *(f"{k}={v}" for k, v in layout.items())]),
    )
    for layout in LAYOUTS
    for tied in (False, True)
]


@pytest.mark.parametrize(("layout", "tied"), CELLS)
def test_all_modes_give_the_numbers_of_off(layout: dict[str, int], tied: bool) -> None:
    model = gpt(tie_embeddings=tied, dropout=0.1).double()
    job = capture(model, batch_of(), next_token_loss, Parallel(**layout))
    costs = costs_of(job)
    plans = {mode: make_plan(job, costs, overlap=mode, search_s=0.5) for mode in ("off", "local", "window")}
    assert [plan.overlap for plan in plans.values()] == ["off", "local", "window"]
    steps = [plan.prediction.step_us for plan in plans.values() if plan.prediction is not None]
    assert steps[0] > steps[1] > steps[2]
    if layout.get("schedule") == "1f1b":
        shared = [window for window in plans["window"].windows.values() if window.shares]
        assert len(shared) == 2, "one window a rank, with F and B of each microbatch"
    expected = numbers(plans["off"], model)
    for mode in ("local", "window"):
        assert_same(numbers(plans[mode], model), expected)


VIRTUAL = (
    "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\n"
    "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n"
)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "tied"),
    [
        pytest.param("virtual", 4, False, marks=pytest.mark.slow),
        pytest.param("virtual", 4, True, marks=pytest.mark.slow),
        pytest.param("zb-h1", 4, False, marks=pytest.mark.slow),
        ("1f1b", 2, False),
        pytest.param("1f1b", 32, False, marks=pytest.mark.slow),
        pytest.param("1f1b", 8, False, marks=pytest.mark.slow),
    ],
)
def test_one_window_a_rank_gives_the_numbers_of_off(
    schedule: str, microbatches: int, tied: bool, tmp_path: Path
) -> None:
    """Of several stages a rank, of split backwards, and of many microbatches."""
    if schedule == "virtual":
        path = tmp_path / "virtual.csv"
        path.write_text(VIRTUAL)
        schedule = str(path)
    stages = 4 if schedule.endswith(".csv") else 2
    model = gpt(layers=stages, tie_embeddings=tied, dropout=0.1).double()
    batch = batch_of(max(ROWS, microbatches))
    parallel = Parallel(pp=2, tp=2, microbatches=microbatches, schedule=schedule)
    job = capture(model, batch, next_token_loss, parallel, stages=stages)
    costs = costs_of(job)
    off = make_plan(job, costs, overlap="off")
    plan = make_plan(job, costs, overlap="window", search_s=20.0 if microbatches == 32 else 0.5)
    assert plan.overlap == "window"
    assert [len(order) for order in plan.schedule.orders] == [1, 1], "one window a rank"
    assert_same(numbers(plan, model, batch), numbers(off, model, batch))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt", LAYOUTS[2]),
        *(
            pytest.param(name, layout, marks=pytest.mark.slow)
            for name, layout in (
                ("llama", LAYOUTS[1]),
                ("gpt2", LAYOUTS[2]),
                ("gpt", {**LAYOUTS[2], "schedule": "gpipe"}),
                ("gpt", {**LAYOUTS[2], "schedule": "eager-1f1b"}),
                ("gpt", {**LAYOUTS[3], "schedule": "zb-h2"}),
                ("gpt", {"tp": 2, "dp": 2, "sequence_parallel": True, "microbatches": 2}),
            )
        ),
    ],
    ids=str,
)
def test_windows_have_the_numbers_of_the_plain_model(name: str, layout: dict[str, int]) -> None:
    model, loss = MODELS[name]().double(), loss_of(name)
    job = capture(model, batch_of(), loss, Parallel(**layout))
    plan = make_plan(job, costs_of(job), overlap="window")
    # All forwards of a rank come before its first backward: there is none to run beside it.
    assert plan.overlap == ("local" if layout.get("schedule") == "gpipe" else "window"), plan.overlap_why
    assert_plan_is_plain(plan, model, loss, batch_of())
