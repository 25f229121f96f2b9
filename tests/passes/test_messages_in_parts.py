"""Full values cross in parts when that is faster or relieves a card, and not else; no bit changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import stretto
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.costs import Costs
from stretto.ir.program import Edge, Job
from stretto.passes.messages_in_parts import messages_in_parts
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.cells import slow
from tests.parallelize.equality import (
    MODELS,
    SMALL,
    assert_plain,
    batch_of,
    from_transformers,
    gpt,
    loss_of,
    step,
)
from tests.passes.steps import after, costs_of
from tests.passes.test_scatter_borders import SKIPS_BATCH, Skips, job_of, kinds, skips_job, skips_loss


def full(model: nn.Module, name: str = "gpt", **layout: object) -> Job:
    """A job in which capturing has cut nothing."""
    return job_of(model, name, ("scatter_borders",), **layout)


def quick(job: Job) -> Costs:
    """Tensor-parallel ranks share a node, stages do not."""
    return costs_of(job, link=10.0, gather=1000.0)


def cut_of(job: Job, costs: Costs) -> Job:
    made, priced = after(messages_in_parts, job, costs)
    starts = {
        (s.index, op.name) for s in made.stages for ops in s.ops.values() for op in ops if op.collective
    }
    assert starts <= priced.op_us.keys()
    return made


def gradients(job: Job) -> list[Edge]:
    return [edge for edge in job.edges if edge.phase is Phase.I]


@pytest.mark.parametrize(
    "name",
    [
        "gpt tied, learned positions",
        *map(slow, ("gpt", "gpt2", "llama")),
    ],
)
def test_a_gradient_crosses_in_parts_with_the_same_bits(name: str) -> None:
    model = MODELS[name]().double()
    job = full(model, name)
    cut = cut_of(job, quick(job))
    [before], [after] = gradients(job), gradients(cut)
    assert after.spec.nbytes * 2 == before.spec.nbytes
    assert kinds(cut, 0, Phase.I) == ["all_gather", *kinds(job, 0, Phase.I)]
    loss, grads = step(cut, model, batch_of())
    expected, wanted = step(job, model, batch_of())
    assert loss == expected
    assert grads.keys() == wanted.keys()
    for one, grad in grads.items():
        assert torch.equal(grad, wanted[one]), one


@pytest.mark.parametrize(
    ("overlap", "recompute"),
    [
        ("off", "full"),
        ("local", "none"),
        ("window", "full"),
        *(slow(*cell) for cell in (("off", "none"), ("local", "full"), ("window", "none"))),
    ],
)
def test_plans_have_it_and_are_proved(overlap: str, recompute: str) -> None:
    job = replace(full(gpt().double()), recompute=recompute)
    plan = make_plan(job, quick(job), overlap=overlap)  # type: ignore[arg-type]
    verify(plan)
    assert ("recompute" in str(plan)) is (recompute == "full")
    assert all("_own" in edge.value for edge in gradients(plan.job))
    kept = replace(job, message_parts=False)
    assert gradients(make_plan(kept, quick(kept), overlap=overlap).job) == gradients(job)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("link", "gather", "latency_us", "pays"),
    [
        (10.0, 1000.0, 0.0, True),
        (10.0, 1000.0, 1e4, False),
        (10.0, 10.0, 0.0, False),
        (1e3, 10.0, 0.0, False),
    ],
    ids=["a slow link", "all latency", "links alike", "a slow gather"],
)
def test_cut_when_and_only_when_it_is_sooner(
    link: float, gather: float, latency_us: float, pays: bool
) -> None:
    job = full(gpt().double())
    cut = cut_of(job, costs_of(job, link=link, gather=gather, latency_us=latency_us))
    assert (cut is not job) is pays


def test_cut_where_it_relieves_the_busiest_card() -> None:
    """Messages and collectives share cards: the gather moves load from the sender of the gradient to its
    receiver, which pays where the sender's card is the busier one."""
    model = from_transformers("LlamaForCausalLM", **{**SMALL, "num_hidden_layers": 3}).double()
    late = job_of(model, "llama", split=["model.layers.1"])
    early = job_of(model, "llama", split=["model.layers.2"])
    for job, pays in ((late, True), (early, False)):
        costs = costs_of(job, link=10.0, gather=20.0, shared=("tp",))
        assert (cut_of(job, costs) is not job) is pays


def test_what_need_not_or_cannot_be_cut_stays() -> None:
    model = gpt().double()
    sharded = job_of(model, sequence_parallel=True)
    assert cut_of(sharded, quick(sharded)) is sharded
    skipped = job_of(model, skip=("messages_in_parts", "scatter_borders"))
    assert cut_of(skipped, quick(skipped)) is skipped
    job = full(model)
    without = quick(job)
    without = replace(
        without, collectives={k: c for k, c in without.collectives.items() if k[1] != "all_gather"}
    )
    assert cut_of(job, without) is job
    odd = {name: leaf[:, :5] for name, leaf in batch_of(2).items()}
    layout = Parallel(pp=2, tp=2, microbatches=2, skip_passes=("scatter_borders",))
    five = stretto.capture(model, odd, loss_of("gpt"), layout)
    assert cut_of(five, quick(five)) is five


def test_what_skips_stages_is_cut_for_each() -> None:
    """A sum that two stages read, and its gradient's parts, with nothing scattered when captured."""
    model = Skips().double()
    job = skips_job(model, ("scatter_borders",))
    cut = cut_of(job, quick(job))
    assert all(
        after.spec.nbytes * 2 == before.spec.nbytes
        for after, before in zip(cut.edges, job.edges, strict=True)
    )
    assert kinds(cut, 2).count("all_gather") == 2
    assert_plain(cut, model, skips_loss, SKIPS_BATCH)
