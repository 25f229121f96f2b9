"""What tensor-parallel ranks hold parts of goes from shard to shard, wherever stages end."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import stretto
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.placed_programs import differing_in
from stretto.ir.program import Edge, Job
from stretto.passes.borders import gather_behind
from stretto.planning.make_plan import make_plan
from tests.parallelize.equality import (
    MODELS,
    assert_plain,
    assert_plan_is_plain,
    batch_of,
    gpt,
    loss_of,
    step,
)
from tests.passes.test_messages_in_parts import costs_of
from tests.passes.test_scatter_borders import SKIPS_BATCH, Skips, kinds, skips_job, skips_loss
from tests.runtime.equality import lowered


@cache
def job_of(name: str, split: tuple[str, ...], skip: Any = ("gather_behind",), **layout: Any) -> Job:
    settings = {"tp": 2, "pp": 2, "microbatches": 2, "sequence_parallel": True, **layout}
    parallel = Parallel(**settings, split=list(split), skip_passes=skip)
    return stretto.capture(MODELS[name]().double(), batch_of(), loss_of(name), parallel)


def wholes(job: Job) -> list[Edge]:
    """Messages of what all tensor-parallel ranks hold alike."""
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


FAST = ("head", "blocks.0", "blocks.1")
CUTS = [
    pytest.param(name, cut, marks=[] if cut in FAST else [pytest.mark.slow])
    for name in ("gpt", "llama")
    for cut in cut_at(name)
]


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_spread_sequence_is_never_gathered_before_it_is_sent(name: str, cut: str) -> None:
    before, after = job_of(name, (cut,)), job_of(name, (cut,), ())
    assert wholes(after) == []
    halves = {str(edge.spec) for edge in wholes(before)}
    assert bool(halves) is (cut not in ("blocks.1", "model.layers.1")), "these end where a sequence is spread"
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
    """Of which one holds the gather of the products that the next begins with."""
    model = gpt(layers=4).double()
    split = ["blocks.1", "blocks.2.attention.qkv", "head"]
    parallel = Parallel(
        pp=2, tp=2, microbatches=4, sequence_parallel=True, split=split, schedule=schedule, virtual_stages=2
    )
    job = stretto.capture(model, batch_of(), loss_of("gpt"), parallel)
    assert len(job.stages) == 4
    assert wholes(job) == []
    assert_plan_is_plain(lowered(job, schedule), model, loss_of("gpt"), batch_of())


def test_skips_go_in_parts_where_the_link_is_slow() -> None:
    """Without a spread sequence sums are scattered before the border; what is left whole is cut."""
    model = Skips().double()
    job = skips_job(model)
    plan = make_plan(job, costs_of(job, link=1.0, gather=1000.0), schedule="1f1b")
    assert any(edge.target - edge.source == 2 for edge in plan.job.edges)
    assert wholes(plan.job) == []
    assert_plain(plan.job, model, skips_loss, SKIPS_BATCH)


def test_what_its_own_stage_reads_as_well_stays_gathered() -> None:
    """The products of queries are in the stage that gathers, those of keys in the next."""
    job = job_of("llama", ("model.layers.1.self_attn.k_proj",))
    assert wholes(job)
    assert gather_behind(job) is job
