"""Bounds in closed form: no plan is faster. Estimates: by a formula where there is one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.ir.parameters import Zero
from stretto.price.cluster import Description
from stretto.price.cluster_file import named_cluster
from stretto.tune.block import BlockWork, Exposure, TuneBlock, block_of
from stretto.tune.choices import Candidate, Choices, Dealt, LayoutChoice
from stretto.tune.estimate import bound_us, estimate, fastest_us
from stretto.tune.resident import Fixed, Shares
from stretto.tune.work import Asked, Planned, TuneWork, captures_of
from tests.families import ONE_STAGE
from tests.tune.small import CLUSTER, settings

EVEN = TuneBlock(1, 0.0, {"none": BlockWork((1e3, 1e3, 1e3), 8e6)}, {0: Fixed(16e6)}, 0.0, 0.0)


def test_an_estimate_is_the_schedule_s_own_formula() -> None:
    for family, idle in (("1f1b", 3 * (1 + 2)), ("zb-h1", 3 * (1 + 1 - 1)), ("gpipe", 3 * (1 + 2))):
        for m in (8, 64):
            found = estimate(
                Candidate(LayoutChoice(4, 1, 1, 1, False, m), family, 1),
                EVEN,
                EVEN.again["none"],
                CLUSTER.model_copy(update={"latency_us": 0.0}),
            )
            assert found.step_us == pytest.approx((3 * m + idle) * 1e3 / 4)
            live = {"1f1b": 4, "zb-h1": 4, "gpipe": m}[family]
            assert found.peak_bytes == pytest.approx(4e6 + live * 2e6)


def test_what_zero_deals_out_is_shared_by_copies(tmp_path: Path) -> None:
    """16 bytes a parameter: with zero 1 a rank has parts of its own values and two averages, with 2 of
    gradients too, with 3 of what ops read."""
    given = settings(tmp_path).parallel.model_copy(update={"pp": 1, "dp": 4, "microbatches": 2})
    block = block_of(captures_of(settings(tmp_path), CLUSTER), given, CLUSTER, ("none",), 1)
    n = block.fixed[0].full / 16
    for dp, expected in ((2, {0: 16, 1: 14, 2: 12, 3: 8}), (4, {0: 16, 1: 11, 2: 8, 3: 4})):
        layout = LayoutChoice(1, dp, 1, 1, False, 4)
        for zero, each in expected.items():
            assert block.fixed_bytes(layout, Dealt(zero)) == each * n
        assert block.fixed_bytes(replace(layout, dp=8), Dealt(1, dp)) == expected[1] * n


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_microbatches_gather_and_scatter_is_in_the_estimate(tmp_path: Path, zero: Zero) -> None:
    given = settings(tmp_path)
    parallel = given.parallel.model_copy(update={"pp": 1, "dp": 4, "microbatches": 2, "zero": zero})
    doing = TuneWork(given.model_copy(update={"parallel": parallel}), 4, CLUSTER, {})
    candidate = Candidate(LayoutChoice(1, 4, 1, 1, False, 2), "1f1b", 1, dealt=Dealt(zero))
    block, made = doing.do(Asked(candidate, None, ("none",))), doing.do(Asked(candidate, "list"))
    assert isinstance(block, TuneBlock)
    assert isinstance(made, Planned)
    found = estimate(candidate, block, block.again["none"], CLUSTER)
    assert bound_us(candidate.layout, block.again["none"]) <= made.step_us
    assert found.step_us == pytest.approx(made.step_us, rel=0.3)


def test_a_rank_with_more_than_its_share_is_what_a_step_takes_the_time_of() -> None:
    candidate = Candidate(LayoutChoice(4, 1, 1, 1, False, 64), "1f1b", 1)
    work = (0.4, 0.2, 0.2, 0.2)
    uneven = replace(EVEN, shares={4: Shares(work, work, work)})
    even_us, uneven_us = (
        estimate(candidate, one, EVEN.again["none"], CLUSTER).step_us for one in (EVEN, uneven)
    )
    assert uneven_us == pytest.approx(1.6 * even_us, rel=0.05)


def test_a_split_backward_exposes_what_a_whole_one_hides() -> None:
    """I alone has the collectives that W's products hide in B."""
    exposing = replace(EVEN.again["none"], exposure=Exposure((1.5, 1.5, 1.0), 1.05, 1.05))
    layout = LayoutChoice(4, 1, 1, 1, False, 64)

    def steady_us(family: str, virtual_stages: int) -> float:
        candidate = Candidate(layout, family, virtual_stages)
        steps = [estimate(candidate, EVEN, work, CLUSTER).step_us for work in (exposing, EVEN.again["none"])]
        return steps[0] / steps[1]

    assert steady_us("1f1b", 1) < 1.15  # forwards are joined with backwards
    assert steady_us("zb-v", 2) > steady_us("1f1b", 1)


@pytest.mark.parametrize("family", ONE_STAGE)
def test_the_bound_of_one_stage_a_rank_is_below_every_family(family: str) -> None:
    for p in (1, 2, 4, 8):
        for m in (1, 2, 8, 32):
            layout = LayoutChoice(p, 1, 1, 1, False, m)
            work = EVEN.again["none"]
            found = estimate(Candidate(layout, family, 1), EVEN, work, CLUSTER)
            assert bound_us(layout, work, virtual=False) <= found.step_us
            assert bound_us(layout, work) <= bound_us(layout, work, virtual=False)


BOTH = ("list", "improve")


def check_bounds(
    tmp_path: Path,
    found: Description,
    count: int,
    seed: int,
    precision: str,
    orders: Sequence[str] = ("list",),
) -> int:
    """Random candidates, planned: how many were."""
    given = settings(tmp_path, more=f'[output]\nrun_dir = "{tmp_path}"\n').model_copy(
        update={"precision": precision}
    )
    choices = Choices(given, 8)
    draw = random.Random(seed)
    layouts = list(choices.layouts())
    doing = TuneWork(given, 8, found, {})
    planned = 0
    while planned < count:
        layout = draw.choice(layouts)
        family, each = draw.choice(list(choices.orders(layout)))
        word = draw.choice(choices.again(layout))
        block = doing.do(Asked(choices.plain(layout), None, ("none",)))
        assert isinstance(block, TuneBlock), block
        made = doing.do(Asked(Candidate(layout, family, each, word), draw.choice(orders)))
        if not isinstance(made, Planned):
            continue
        planned += 1
        bound = bound_us(layout, block.again["none"], choices.several_stages(layout) and each > 1)
        assert bound <= made.step_us, made.candidate
        rate = fastest_us(block.flops, found, precision)
        assert rate <= block.again["none"].compute_us
    return planned


def test_no_plan_is_faster_than_its_layout_s_bound(tmp_path: Path) -> None:
    assert check_bounds(tmp_path, CLUSTER, 2, 0, "float32") == 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_no_plan_of_many_is_faster_than_its_layout_s_bound(tmp_path: Path, precision: str) -> None:
    assert check_bounds(tmp_path, CLUSTER, 40, 1, precision, BOTH) == 40
    assert check_bounds(tmp_path, named_cluster("h100x8"), 40, 2, precision, BOTH) == 40
