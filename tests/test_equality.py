"""A plan's numbers are the plain model's: for every family, cut and model, loss and all gradients.

Three claims for every cell of the grid: equal to the plain model in one process on the whole batch, within
the tolerance of regrouped sums; equal to itself bit by bit when run again; equal bit by bit to every other
family, since families only reorder. Ranks are threads here; `test_equality_processes.py` does it on Gloo.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.equality import (
    FAMILIES,
    MODELS,
    TOLERANCE,
    Result,
    assert_equal,
    assert_same_bits,
    batch_of,
    job_of,
    loss_of,
    lowered,
    model_of,
    plain,
    plan_of,
    run,
    traced,
)

STAGES = (1, 2, 4)
MICROBATCHES = (1, 2, 5, 8)
DTYPES = (torch.float64, torch.float32)
FAST = {
    "gpt tied": ((torch.float64, 1, 5), (torch.float64, 4, 5)),
    "qwen2": ((torch.float64, 2, 2), (torch.float64, 4, 5)),
    "llama": ((torch.float32, 2, 5),),
}
"""Two stages and five microbatches are for every model. One is enough for one stage, for fewer microbatches
than a warm-up has, and for float32; two are for four stages, one with a tie between the outermost."""


def results_of(name: str, dtype: torch.dtype, stages: int, microbatches: int) -> dict[str, Result]:
    """Family -> the step's result. Some plans are made as users make them, with proof and waits for sends."""
    job = job_of(traced(name, dtype), stages, microbatches)
    plan = plan_of if (dtype, microbatches) == (torch.float64, 5) and stages > 1 else lowered
    batch = batch_of(name, microbatches)
    return {family: run(plan(job, family), model_of(name, dtype), batch) for family in FAMILIES}


CELLS = [
    pytest.param(
        name,
        dtype,
        stages,
        microbatches,
        # Float32 differs from float64 in the tolerance alone, one stage has no messages, and four are like
        # two: most of these cells are for the longer run.
        marks=[]
        if (dtype, stages, microbatches) in ((torch.float64, 2, 5), *FAST.get(name, ()))
        else [pytest.mark.slow],
        id=f"{name}-{str(dtype).removeprefix('torch.')}-{stages}-{microbatches}",
    )
    for name in MODELS
    for dtype in DTYPES
    for stages in STAGES
    for microbatches in MICROBATCHES
]


@pytest.mark.parametrize(("name", "dtype", "stages", "microbatches"), CELLS)
def test_every_family_equals_the_plain_model(
    name: str, dtype: torch.dtype, stages: int, microbatches: int
) -> None:
    expected = plain(model_of(name, dtype), batch_of(name, microbatches), loss_of(name, dtype))
    found = results_of(name, dtype, stages, microbatches)
    for result in found.values():
        assert_equal(result, expected, TOLERANCE[dtype])
        assert_same_bits(result, found["gpipe"])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gpt tied" else [pytest.mark.slow]) for n in MODELS]
)
def test_the_same_plan_twice_is_bitwise_equal(name: str) -> None:
    job = job_of(traced(name, torch.float32), 2, 5)
    batch = batch_of(name, 5)
    for family in FAMILIES:
        plan = lowered(job, family)
        first = run(plan, model_of(name, torch.float32), batch)
        assert_same_bits(run(plan, model_of(name, torch.float32), batch), first)


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen2"])
def test_where_the_model_is_cut_changes_no_bit(name: str) -> None:
    """Without ties across stages no sum is regrouped by the cut."""
    one, two, four = (
        run(lowered(job_of(traced(name, torch.float32), stages, 5), "zb-h1"), model, batch_of(name, 5))
        for stages in STAGES
        for model in [model_of(name, torch.float32)]
    )
    assert_same_bits(one, two)
    assert_same_bits(one, four)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["gpt tied", "llama tied", "gpt2"])
def test_a_tied_gradient_is_the_sum_on_each_holder(name: str, stages: int) -> None:
    job = job_of(traced(name, torch.float64), stages, 2)
    groups = job.tied_groups()
    assert len(groups) == 1
    ((tie, holders),) = groups.items()
    assert holders == (0, stages - 1)
    batch = batch_of(name, 2)
    expected = plain(model_of(name, torch.float64), batch, loss_of(name, torch.float64)).grads[tie]
    found = run(plan_of(job, "zb-h1"), model_of(name, torch.float64), batch)
    names = {p.name for p in job.parameters if p.tied_to == tie}
    held = [{n: g for n, g in rank.items() if n in names} for rank in found.by_rank]
    assert [len(grads) for grads in held] == [1, *[0] * (stages - 2), 1]
    assert expected is not None
    for grads in held:
        for grad in grads.values():
            assert (grad - expected).norm() <= 1e-10 * expected.norm()


def test_a_wrong_gradient_is_seen() -> None:
    """The comparison itself: one element of one gradient off by a thousandth is told by name."""
    expected = plain(model_of("gpt", torch.float64), batch_of("gpt", 2), loss_of("gpt", torch.float64))
    name = "blocks.1.mlp.up.weight"
    wrong = {n: None if g is None else g.clone() for n, g in expected.grads.items()}
    grad = wrong[name]
    assert grad is not None
    grad.view(-1)[3] += 1e-3 * grad.norm()
    with pytest.raises(AssertionError, match=r"blocks.1.mlp.up.weight differs by 1.0e-03"):
        assert_equal(Result(expected.loss, wrong), expected, 1e-5)
