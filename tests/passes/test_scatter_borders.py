"""What tensor-parallel ranks reduce or gather crosses stages in parts: the same numbers, less is moved."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.placed_programs import differing_in
from stretto.ir.program import Edge, Job, TensorSpec
from stretto.passes.borders import gather_behind
from tests.cells import slow
from tests.parallelize.equality import (
    MODELS,
    assert_plain,
    assert_plan_is_plain,
    batch_of,
    gpt,
    loss_of,
    step,
)
from tests.runtime.equality import lowered


def job_of(model: nn.Module, name: str = "gpt", skip: tuple[str, ...] = (), **layout: object) -> Job:
    parallel = Parallel(**{"pp": 2, "tp": 2, "microbatches": 2, **layout}, skip_passes=skip)
    return stretto.capture(model, batch_of(), loss_of(name), parallel)


def kinds(job: Job, stage: int, phase: Phase = Phase.F) -> list[str]:
    found = (op.collective for op in job.stages[stage].ops[phase])
    return [one.kind for one in found if one is not None]


def forward_specs(job: Job) -> list[TensorSpec]:
    return [edge.spec for edge in job.edges if edge.phase is Phase.F]


def test_a_sum_that_leaves_is_scattered_and_gathered_behind_the_border() -> None:
    model = gpt().double()
    full, cut = job_of(model, skip=("scatter_borders",)), job_of(model)
    assert kinds(full, 0)[-1] == "all_reduce"
    assert kinds(cut, 0) == [*kinds(full, 0)[:-1], "reduce_scatter"]
    assert kinds(cut, 1) == ["all_gather", *kinds(full, 1)]
    [before], [after] = forward_specs(full), forward_specs(cut)
    assert after.nbytes * 2 == before.nbytes
    # So does the gradient that goes back: the norm that it comes out of takes rows one by one.
    assert kinds(full, 1, Phase.I)[-1] == "all_reduce"
    assert kinds(cut, 1, Phase.I) == [*kinds(full, 1, Phase.I)[:-1], "reduce_scatter"]
    assert kinds(cut, 0, Phase.I) == ["all_gather", *kinds(full, 0, Phase.I)]
    [before], [after] = ([e.spec for e in job.edges if e.phase is Phase.I] for job in (full, cut))
    assert after.nbytes * 2 == before.nbytes
    parts = {p.name for p in cut.parameters if p.partial}
    assert parts == {"blocks.1.attention_norm.weight", "blocks.1.attention_norm.bias"}


def test_a_gradient_stays_whole_where_its_norm_serves_others() -> None:
    """Tied norms: their gradients are sums, of which one term would be of rows and the other of all."""
    model = gpt().double()
    model.blocks[0].attention_norm = model.blocks[1].attention_norm  # type: ignore[union-attr, index]
    job = job_of(model)
    assert kinds(job, 1, Phase.I)[-1] == "all_reduce"
    assert kinds(job, 0)[-1] == "reduce_scatter"
    loss, grads = step(job, model, batch_of())
    expected, wanted = step(job_of(model, skip=("scatter_borders",)), model, batch_of())
    assert loss == expected
    assert all(torch.equal(grad, wanted[name]) for name, grad in grads.items())


@pytest.mark.parametrize("schedule", ["1f1b", slow("zb-h1")])
def test_three_stages_scatter_both_ways(schedule: str) -> None:
    model = gpt(layers=3).double()
    job = job_of(model, pp=3, schedule=schedule)
    for stage in (1, 2):
        assert kinds(job, stage, Phase.I)[-1] == "reduce_scatter"
    for stage in (0, 1):
        assert kinds(job, stage, Phase.I)[0] == "all_gather"
        assert kinds(job, stage)[-1] == "reduce_scatter"
    assert_plain(job, model, loss_of("gpt"), batch_of())


@pytest.mark.parametrize(
    "name",
    [
        "gpt tied, learned positions",
        *map(slow, ("gpt", "gpt2", "llama")),
    ],
)
def test_two_ranks_have_the_same_bits(name: str) -> None:
    model = MODELS[name]().double()
    job = job_of(model, name)
    assert "reduce_scatter" in kinds(job, 0)
    loss, grads = step(job, model, batch_of())
    expected, wanted = step(job_of(model, name, ("scatter_borders",)), model, batch_of())
    assert loss == expected
    assert grads.keys() == wanted.keys()
    regrouped = {p.name for p in job.parameters if p.partial}
    for one, grad in grads.items():
        if one in regrouped:
            assert (grad - wanted[one]).norm() <= 1e-14 * grad.norm(), one
        else:
            assert torch.equal(grad, wanted[one]), one
    assert_plain(job, model, loss_of(name), batch_of())


def test_rows_that_the_axis_does_not_divide_stay_whole() -> None:
    model = gpt().double()
    batch = {name: leaf[:, :5] for name, leaf in batch_of(2).items()}
    parallel = Parallel(pp=2, tp=2, microbatches=2)
    job = stretto.capture(model, batch, loss_of("gpt"), parallel)
    assert "reduce_scatter" not in kinds(job, 0)
    assert_plain(job, model, loss_of("gpt"), batch)


class Skips(nn.Module):
    """What the first block makes is read by both others: the sum goes to two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

    def block(self, at: int, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down[at](torch.tanh(self.up[at](x)))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x + self.block(0, x)
        second = first + self.block(1, first)
        return self.block(2, second) + second * first


SKIPS_BATCH = {"x": torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}


def skips_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = model(batch["x"]).square().mean()
    return made


def skips_job(model: nn.Module, skip: tuple[str, ...] = ()) -> Job:
    """A job of `Skips`, or its like, over three stages and two ranks."""
    layout = Parallel(pp=3, tp=2, microbatches=2, split=["up.1", "up.2"], skip_passes=skip)
    plan = {"up.*": "colwise", "down.*": "rowwise"}
    return stretto.capture(model, SKIPS_BATCH, skips_loss, layout, tp_plan=plan)


def test_a_sum_that_goes_to_two_stages_is_gathered_in_both() -> None:
    model = Skips().double()
    job = skips_job(model)
    edges = [(e.source, e.target, e.spec.shape) for e in job.edges if e.phase is Phase.F]
    assert edges == [(0, 1, (6, 8)), (0, 2, (6, 8)), (1, 2, (6, 8))]
    assert kinds(job, 2).count("all_gather") == 2
    assert_plain(job, model, skips_loss, SKIPS_BATCH)


@cache
def sliced_job(name: str, split: tuple[str, ...], skip: Any = ("gather_behind",), **layout: Any) -> Job:
    settings = {"tp": 2, "pp": 2, "microbatches": 2, "sequence_parallel": True, **layout}
    parallel = Parallel(**settings, split=list(split), skip_passes=skip)
    return stretto.capture(MODELS[name]().double(), batch_of(), loss_of(name), parallel)


def full_values(job: Job) -> list[Edge]:
    """Messages of what all tensor-parallel ranks have alike."""
    own = differing_in(job, "tp")
    return [edge for edge in job.edges if edge.value not in own]


def cut_at(name: str) -> list[str]:
    """Between a gather and its products, before the first block and the last products; a plain cut."""
    if name == "llama":
        return [
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.mlp.gate_proj",
            "model.layers.1",
            "lm_head",
        ]
    return ["blocks.0", "blocks.0.attention.qkv", "blocks.1.mlp.up", "blocks.1", "head"]


FAST = ("blocks.0", "blocks.1")
CUTS = [
    pytest.param(name, cut, marks=[] if cut in FAST else [pytest.mark.slow])
    for name in ("gpt", "llama")
    for cut in cut_at(name)
]


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_spread_sequence_is_never_gathered_before_it_is_sent(name: str, cut: str) -> None:
    before, after = sliced_job(name, (cut,)), sliced_job(name, (cut,), ())
    assert full_values(after) == []
    halves = {str(edge.spec) for edge in full_values(before)}
    count = [sum(len(kinds(job, s, p)) for s in range(2) for p in Phase if p in job.stages[s].ops) for job in
             (before, after)]  # fmt: skip
    assert count[0] == count[1], "as many collectives, elsewhere"
    assert sum(e.spec.nbytes for e in after.edges) < sum(e.spec.nbytes for e in before.edges) or not halves
    if not halves:
        assert gather_behind(before) is before
        return
    model = MODELS[name]().double()
    (loss, grads), (wanted, expected) = (step(job, model, batch_of()) for job in (after, before))
    assert loss == wanted
    assert all(torch.equal(grad, expected[key]) for key, grad in grads.items())
    assert_plain(after, model, loss_of(name), batch_of())


@pytest.mark.parametrize(
    "schedule",
    ["zb-v", *(pytest.param(s, marks=pytest.mark.slow) for s in ("interleaved-1f1b", "dualpipev"))],
)
def test_virtual_stages_send_shards(schedule: str) -> None:
    """Of which one has the gather of the products that the next begins with."""
    model = gpt(layers=4).double()
    split = ["blocks.1", "blocks.2.attention.qkv", "head"]
    parallel = Parallel(
        pp=2, tp=2, microbatches=4, sequence_parallel=True, split=split, schedule=schedule, virtual_stages=2
    )
    job = stretto.capture(model, batch_of(), loss_of("gpt"), parallel)
    assert len(job.stages) == 4
    assert full_values(job) == []
    assert_plan_is_plain(lowered(job, schedule), model, loss_of("gpt"), batch_of())


def test_what_its_own_stage_reads_as_well_stays_gathered() -> None:
    """The products of queries are in the stage that gathers, those of keys in the next."""
    job = sliced_job("llama", ("model.layers.1.self_attn.k_proj",))
    assert full_values(job)
    assert gather_behind(job) is job
