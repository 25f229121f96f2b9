"""Loads of experts as a run lets see them: those of the plain model's routers, counted by hand."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.capturing.evaluation import capture_evaluation
from stretto.config import Parallel
from stretto.ir.metrics import Observed
from stretto.ir.plan import Plan
from stretto.models.moe import MoEConfig, MoEGPT, Router, moe_token_sum
from stretto.parallelize.layout import layout_of
from stretto.parallelize.parts import bounds
from stretto.planning.make_plan import make_plan
from stretto.price.cluster import described_costs
from stretto.runtime import Runner, run_threads
from tests.clusters import cores
from tests.parallelize.test_experts import ALL, CONTEXT, DROPLESS, FEW, batch, model_of, one_sided, plan_of

EXPERTS, TOP = 4, 2

Counted = dict[str, dict[str, Tensor]]
"""Module of experts -> name -> its value."""


def seen_by(plan: Plan, model: nn.Module) -> tuple[Observed, ...]:
    def work(runner: Runner) -> tuple[Observed, ...]:
        runner.step(batch())
        return runner.observed()

    told = run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert all(one == told[0] for one in told)
    return told[0]


def counted(model: MoEGPT, parallel: Parallel, degree: int) -> Counted:
    """By the plain model's routers, microbatch by microbatch, chunk by chunk of the sequence."""
    found: Counted = {}
    config = model.config
    assert isinstance(config, MoEConfig)

    def add(module: str, name: str, value: Tensor, most: bool = False) -> None:
        of = found.setdefault(module, {})
        before = of.get(name, torch.zeros_like(value))
        of[name] = torch.maximum(before, value) if most else before + value

    def see(module: str) -> Any:
        def hook(_module: nn.Module, _args: Any, routed: Any) -> None:
            chosen_BSK = routed.chosen.view(-1, CONTEXT, TOP)
            for start, end in bounds_of(degree):
                counts = torch.bincount(chosen_BSK[:, start:end].flatten(), minlength=EXPERTS)
                rows = int(counts.sum())
                add(module, "rows", counts)
                if config.capacity_factor is not None:
                    add(module, "dropped", (counts - config.capacity(rows // TOP)).clamp(min=0))
                elif parallel.ep > 1:
                    most = counts.view(parallel.ep, -1).sum(dim=1).max()
                    add(module, "buffer", (most * parallel.ep / rows).view(1), most=True)

        return hook

    own = copy.deepcopy(model)
    for name, module in own.named_modules():
        if isinstance(module, Router):
            module.register_forward_hook(see(name.replace("router", "experts")))
    for part in batch().chunk(parallel.microbatches * parallel.dp):
        moe_token_sum(own, part)
    return found


def bounds_of(degree: int) -> list[tuple[int, int]]:
    ends = bounds(CONTEXT, degree)
    return list(itertools.pairwise(ends))


def assert_counted(found: tuple[Observed, ...], want: Counted, modules: int | None = None) -> None:
    told = {(one.module, one.name): one for one in found}
    names = list(want)[:modules]
    assert {key for key in told if key[0] in names} == {(m, name) for m in names for name in want[m]}
    for module in names:
        for name, value in want[module].items():
            assert told[module, name].mean == pytest.approx(value.tolist(), rel=1e-6), (module, name)


LAYOUTS = (
    Parallel(),
    Parallel(dp=2, microbatches=2),
    Parallel(ep=2, dp=2),
    Parallel(ep=2, dp=4),
    Parallel(ep=2, dp=2, pp=2, microbatches=2, schedule="zb-h1"),
    Parallel(ep=2, dp=2, microbatches=2, recompute="full"),
    Parallel(ep=2, dp=2, ampipe_degree=3),
    Parallel(ep=2, dp=2, ampipe_degree=2, ampipe_capacity="whole", pp=2, microbatches=2),
    Parallel(ep=2, dp=2, pipe_experts_multi_data=2),
)
FAST = {(DROPLESS, 4), (FEW, 1), (FEW, 6)}


@pytest.mark.parametrize(
    ("capacity", "parallel"),
    [
        pytest.param(
            capacity,
            p,
            marks=() if (capacity, at) in FAST else pytest.mark.slow,
            id=f"{capacity} pp{p.pp} dp{p.dp} ep{p.ep} x{p.ampipe_degree} {p.ampipe_capacity} {p.recompute}",
        )
        for capacity in (DROPLESS, FEW, ALL)
        for at, p in enumerate(LAYOUTS)
    ],
)
def test_it_is_what_routers_chose(capacity: float | None, parallel: Parallel) -> None:
    parallel = parallel.model_copy(update={"ep_buffer": 4.0})
    model = model_of(capacity)
    # Experts that serve all chunks together are not called by chunks.
    whole = parallel.ampipe_capacity == "whole" and capacity is not None
    degree = 1 if whole else int(parallel.ampipe_degree)
    # Where each chunk has its own capacity, what is dropped is other than in the plain model, from there on.
    apart = 1 if capacity == FEW and degree > 1 else None
    assert_counted(seen_by(plan_of(model, parallel), model), counted(model, parallel, degree), apart)


def test_what_finds_no_room_is_counted() -> None:
    model = one_sided()
    plan = plan_of(model, Parallel(ep=2, dp=2, ep_buffer=1.5, ep_overflow="drop"))
    rows = 4 * CONTEXT * TOP  # of a rank, all of them for the first rank's experts
    room = math.ceil(1.5 * rows / 2)
    for one in seen_by(plan, model):
        if one.name == "rows":
            assert one.mean == (rows, rows, 0, 0)
        elif one.name == "dropped":
            assert one.mean == (0, 2 * (rows - room), 0, 0)
        else:
            assert one.name == "buffer"
            assert one.mean == (2.0,)


def test_an_evaluation_drops_what_finds_no_room() -> None:
    """Where training would end with an error."""
    model = one_sided()
    parallel = Parallel(ep=2, dp=2, ep_buffer=1.5)
    training = capture(model, batch(), moe_token_sum, parallel)
    job = capture_evaluation(model, batch(), moe_token_sum, training, layout=layout_of(model, parallel))
    costs, of_ops = (described_costs(one, cores(latency_us=20.0, link_gbps=0.05)) for one in (training, job))
    found = seen_by(make_plan(job, replace(costs, op_us=of_ops.op_us)), model)
    room = math.ceil(1.5 * 4 * CONTEXT * TOP / 2)
    dropped = [one.mean for one in found if one.name == "dropped"]
    assert dropped == [(0, 2 * (4 * CONTEXT * TOP - room), 0, 0)] * 2


def test_experts_of_transformers_are_seen_where_ranks_share_them() -> None:
    pytest.importorskip("transformers")
    from stretto.models.build import huggingface_sum
    from tests.parallelize.test_experts_of_transformers import MODELS, SIZES
    from tests.runtime.equality import from_transformers

    kind, own, _ = MODELS["mixtral"]
    model = from_transformers(kind, **{**SIZES, **own}).double()
    ids = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "labels": ids}
    for parallel in (Parallel(ep=2, dp=2, ep_buffer=4.0), Parallel(dp=2)):
        job = capture(model, given, huggingface_sum, parallel)
        plan = make_plan(job, described_costs(job, cores(latency_us=20.0, link_gbps=0.05)))

        def work(runner: Runner) -> tuple[Observed, ...]:
            runner.step(given)
            return runner.observed()

        found, _ = run_threads(plan, lambda _: copy.deepcopy(model), work)
        rows = [one for one in found if one.name == "rows"]
        if parallel.ep == 1:
            assert found == ()
        else:
            assert len(rows) == 2
            assert all(sum(one.mean) == ids.numel() * TOP for one in rows)
