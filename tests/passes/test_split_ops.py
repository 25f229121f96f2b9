"""Products are cut with their collectives when the costs say so, and not else; numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.program import Job
from stretto.passes.split_ops import chains, split_products
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.cells import slow
from tests.order.test_order_equality import numbers
from tests.parallelize.equality import MODELS, assert_plain, batch_of, loss_of
from tests.passes.steps import after
from tests.passes.test_passes import job_of, ops_of

PRODUCT_US, OTHER_US, BYTE_US = 800.0, 2.0, 0.1


def costs_of(
    job: Job, *, product_us: float = PRODUCT_US, byte_us: float = BYTE_US, latency_us: float = 5.0
) -> Costs:
    """Products by their arithmetic, `product_us` on average, collectives by their bytes, the rest short."""
    products = [op.flops for op in ops_of(job) if op.target == "aten.mm.default"]
    op_us = {
        (stage.index, op.name): OTHER_US + (product_us - OTHER_US) * op.flops * len(products) / sum(products)
        if op.target == "aten.mm.default"
        else 0.0
        if op.alias
        else OTHER_US
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }
    line = CollectiveCost(Curve(((0.0, latency_us), (1e6, latency_us + 1e6 * byte_us))))
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    link = Link(1.0, 1000.0)
    return Costs(op_us, {}, link, 1.0, "made up", {("tp", kind): line for kind in kinds})


def parts_of(job: Job) -> set[str]:
    return {op.name for op in ops_of(job) if "_part" in op.name}


@pytest.mark.parametrize("sp", [False, True])
def test_every_sum_that_a_product_makes_can_be_cut(sp: bool) -> None:
    """Two layers have two rowwise and two colwise matrices each; the head's input gradient is a sum, too."""
    job = job_of("gpt", 2, sp)
    assert len(chains(job.stages[0])) == 2 * 4 + 1


@pytest.mark.parametrize(
    ("more", "pays"),
    [
        ({}, True),
        ({"latency_us": 5000.0}, False),
        ({"byte_us": 1e-6}, False),
        ({"product_us": OTHER_US}, False),
    ],
    ids=["as long as each other", "all latency", "no time on the lane", "all overhead"],
)
def test_cut_when_and_only_when_it_pays(more: dict[str, float], pays: bool) -> None:
    job = job_of("gpt", 2)
    cut, costs = after(split_products, replace(job, split_ops=True), costs_of(job, **more))
    assert bool(parts_of(cut)) is pays
    assert (cut.stages is job.stages) is not pays
    assert {(0, op.name) for op in ops_of(cut)} <= costs.op_us.keys()
    assert sum(op.flops for op in ops_of(cut)) == sum(op.flops for op in ops_of(job))
    nbytes = [sum(op.collective.nbytes for op in ops_of(j) if op.collective is not None) for j in (job, cut)]
    assert nbytes[0] == nbytes[1]


def test_a_plan_is_cut_only_when_asked_and_when_it_is_faster() -> None:
    job = job_of("gpt", 2)
    full = make_plan(job, costs_of(job), overlap="local")
    asked = make_plan(replace(job, split_ops=True), costs_of(job), overlap="local")
    assert not parts_of(full.job)
    assert parts_of(asked.job)
    assert full.prediction is not None
    assert asked.prediction is not None
    assert asked.prediction.step_us < 0.97 * full.prediction.step_us
    baseline = make_plan(replace(job, split_ops=True), costs_of(job), overlap="off")
    assert not parts_of(baseline.job), "waited for at once, parts only add ops"


@pytest.mark.parametrize(
    ("name", "tp", "sp", "pp"),
    [
        ("gpt", 2, False, 1),
        ("gpt", 2, True, 2),
        *(
            slow(*cell)
            for cell in (
                ("gpt", 2, True, 1),
                ("gpt", 4, True, 1),
                ("llama", 2, True, 2),
                ("llama", 2, False, 1),
                ("llama", 2, True, 1),
            )
        ),
    ],
)
def test_numbers_stay(name: str, tp: int, sp: bool, pp: int) -> None:
    job = job_of(name, tp, sp, pp)
    cut, costs = after(split_products, replace(job, split_ops=True), costs_of(job))
    assert parts_of(cut)
    plan = make_plan(cut, costs, schedule="1f1b", overlap="local")
    verify(plan)
    model = MODELS[name]().double()
    uncut = make_plan(job, costs_of(job), schedule="1f1b", overlap="off")
    parts, full = numbers(plan, model), numbers(uncut, model)
    assert_plain(cut, model, loss_of(name), batch_of())
    for (told, grads), (want, wanted) in zip(parts, full, strict=True):
        assert torch.allclose(told, want, rtol=1e-12, atol=0)
        assert grads.keys() == wanted.keys()
        for key, grad in wanted.items():
            want, made = (
                one.as_subclass(torch.Tensor) for one in (grad, grads[key])
            )  # parts, compared as such
            assert (made - want).norm() <= 1e-10 * want.norm(), key
