"""Ops that passes make are priced by what they are, from a list of prices, equal on all ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.prices import signature, specs_of
from stretto.ir.program import Const, Job, Op, Ref, TensorSpec
from stretto.passes.recompute import repeat
from stretto.planning.make_plan import listed, prices_of
from stretto.price.alike import ListedPricer
from stretto.price.calibration import Calibration, Machine, Timing
from stretto.price.cluster import describe
from stretto.price.priced import CalibratedPricer
from stretto.schedule.families import make_schedule
from tests.clusters import cores
from tests.price.comm_job import comm_job


def measured(job: Job) -> Costs:
    """Times with noise, as if every op had been measured."""
    noise = random.Random(3)
    costs = prices_of(job, make_schedule("1f1b", 2, 2), cores()).costs_of(job)
    return replace(costs, op_us={key: us * noise.uniform(0.9, 1.1) for key, us in costs.op_us.items()})


def test_neither_names_nor_places_make_a_price() -> None:
    job = comm_job(2, tp=2, rows=32, hidden=64)
    prices, specs = listed(job, measured(job)), specs_of(job)
    for op in job.stages[0].ops[Phase.F]:
        moved = replace(op, name="elsewhere", module="another.module")
        assert prices.us(moved, specs) == prices.us(op, specs)
    first, second = (s.ops[Phase.F][0] for s in job.stages)
    assert signature(first, specs) == signature(second, specs)
    assert prices.us(first, specs) == prices.us(second, specs)


def test_parts_of_products_and_collectives_take_parts_of_the_time() -> None:
    job = comm_job(2, tp=2, rows=128, hidden=256)
    costs, specs = measured(job), specs_of(job)
    pricer = ListedPricer(job, costs)
    full = next(op for op in job.stages[0].ops[Phase.F] if op.flops)
    (rows, inner), (_, columns) = (specs[name].shape for name in full.uses)
    shapes = (rows, inner), (inner, columns // 2), (rows, columns // 2)
    x, w, y = (TensorSpec(shape, "float32") for shape in shapes)
    half = Op("y", full.target, (Ref("x"), Ref("w")), (), (y,), flops=full.flops // 2)
    assert 0.3 < pricer.price(half, {"x": x, "w": w}).us / pricer.price(full, specs).us < 0.8
    asked = next(op.collective for op in job.stages[0].ops[Phase.F] if op.collective is not None)
    assert pricer.finish_us(asked) == 0.0


@pytest.mark.parametrize("cluster", ["h100x8", "flat"])
def test_what_is_described_prices_what_passes_make_as_the_job(cluster: str) -> None:
    job = comm_job(2, tp=2, rows=32, hidden=64)
    found = describe(cores() if cluster == "flat" else cluster)
    assert found is not None
    prices = prices_of(job, make_schedule("1f1b", 2, 2), found)
    made = repeat(job, {0: [op.name for op in job.stages[0].ops[Phase.F]]})
    assert made != job
    assert prices.costs_of(made) == prices_of(made, make_schedule("1f1b", 2, 2), found).costs_of(made)


def test_equal_lists_give_equal_prices() -> None:
    job = comm_job(2, tp=2, rows=32, hidden=64)
    made = repeat(job, {0: [op.name for op in job.stages[0].ops[Phase.F]]})
    costs = measured(job)
    backwards = replace(costs, op_us=dict(reversed(costs.op_us.items())))
    assert listed(job, costs).costs_of(made) == listed(job, backwards).costs_of(made)
    assert listed(job, costs).costs_of(made).op_us.items() >= costs.op_us.items()


@pytest.mark.parametrize("kernel", ["flash_attention_for_cpu", "efficient_attention"])
def test_attention_of_a_length_is_priced_by_attention_with_the_same_kind_of_mask(kernel: str) -> None:
    def attention(length: int, masked: bool) -> tuple[Op, dict[str, TensorSpec]]:
        specs = dict.fromkeys("qkv", TensorSpec((1, 8, length, 64), "float32"))
        specs["m"] = TensorSpec((1, 1, length, length), "float32")
        if kernel == "efficient_attention":  # both are causal
            more, named = (Ref("m") if masked else None, True, 0.0, True), ()
        else:
            more, named = (0.0, not masked), (("attn_mask", Ref("m")),) if masked else ()
        op = Op(
            "y",
            f"aten._scaled_dot_product_{kernel}.default",
            (*map(Ref, "qkv"), *more),
            named,
            (specs["q"], None),
            flops=4 * 8 * length * length * 64,
        )
        return op, specs

    def timed(length: int, masked: bool, us: float) -> tuple[str, Timing]:
        op, specs = attention(length, masked)
        return signature(op, specs), Timing(us, 0.0, op.flops, 1)

    known = dict(timed(n, masked, us) for n, masked, us in MEASURED)
    pricer = CalibratedPricer(Calibration(Machine("here", "2", 1), ops=known))
    assert 100.0 < pricer.price(*attention(768, False)).us < 400.0
    assert 1000.0 < pricer.price(*attention(768, True)).us < 4000.0


MEASURED = [(512, False, 100.0), (1024, False, 400.0), (512, True, 1000.0), (1024, True, 4000.0)]
"""Lengths, whether there is a mask, microseconds."""


def test_a_signature_says_shapes_layouts_and_numbers_and_no_names() -> None:
    specs = {"a": TensorSpec((2, 3), "float32"), "b": TensorSpec((3, 4), "bfloat16", (1, 3))}
    op = Op("mm_1", "aten.mm.default", (Ref("a"), Ref("b")))
    other = Op("mm_2", "aten.mm.default", (Ref("x"), Ref("y")))
    renamed = {"x": specs["a"], "y": specs["b"]}
    assert signature(op, specs) == "aten.mm.default(float32[2,3], bfloat16[3,4]{1,3})"
    assert signature(other, renamed) == signature(op, specs)
    listed = Op("c", "aten.cat.default", ((Ref("a"), Ref("b")), -1), (("dtype", Const("dtype", "float32")),))
    assert signature(listed, specs) == (
        "aten.cat.default([float32[2,3], bfloat16[3,4]{1,3}], -1, dtype=dtype:float32)"
    )
    assert signature(Op("s", "aten.sum.dim_IntList", (Ref("a"), (0,))), specs) != signature(
        Op("s", "aten.sum.dim_IntList", (Ref("a"), (1,))), specs
    )
