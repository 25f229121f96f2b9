"""Schedules and numbers of stages that users choose: they reach the plan, or are refused before it runs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.ir.stage_maps import PLACES
from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.clusters import cores
from tests.runtime.equality import (
    assert_equal,
    assert_same_bits,
    gather,
    gpt,
    plain,
    run,
    tokens,
)
from tests.synthetic import make_costs, make_job

REFUSED = {
    "other stages": (
        {"pp": 4},
        {},
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
        "has 2 stages, but the job has 4",
    ),
    "a rank without actions": (
        {"pp": 3},
        {"stages": 2},
        "0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n",
        "rank 1 of the schedule 'csv' has no stage",
    ),
    "a deadlock": ({"pp": 2}, {}, "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n", "1F1"),
    "stages that a family cannot have": (
        {"pp": 2, "schedule": "zb-v", "virtual_stages": 3},
        {},
        "",
        "'zb-v' has 2 stages a rank, not virtual_stages = 3",
    ),
    "more stages than the family has": (
        {"pp": 2, "schedule": "1f1b", "split": ["blocks.1", "blocks.2", "norm"]},
        {},
        "",
        "schedule '1f1b' has 1 stage a rank",
    ),
    "another number of cuts": (
        {"pp": 2, "virtual_stages": 3, "split": ["blocks.1", "blocks.2", "norm"]},
        {},
        "",
        "makes 4 stages, but pp = 2 and virtual_stages = 3 make 6",
    ),
    "stages that ranks cannot share": (
        {"pp": 2, "schedule": "1f1b"},
        {"stages": 3},
        "",
        "3 stages, and '1f1b' gives each of pp = 2 ranks equally",
    ),
}


def planned(settings: dict[str, Any], more: dict[str, Any], microbatches: int = 2) -> stretto.Plan:
    parallel = stretto.Parallel(microbatches=microbatches, **settings)
    job = stretto.capture(gpt(True), tokens(microbatches, columns=8), next_token_loss, parallel, **more)
    return stretto.plan(job, cores())


@pytest.mark.parametrize(("settings", "more", "csv", "word"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_run_is_refused_before_it_runs(
    settings: dict[str, Any], more: dict[str, Any], csv: str, word: str, tmp_path: Path
) -> None:
    if csv:
        path = tmp_path / "own.csv"
        path.write_text(csv)
        settings = {**settings, "schedule": str(path)}
    with pytest.raises((stretto.UsageError, stretto.PlanError), match=word):
        planned(settings, more)


def test_a_family_takes_the_stages_that_another_cannot() -> None:
    split = ["blocks.1", "blocks.2", "norm"]
    plan = planned({"pp": 2, "schedule": "zb-v", "split": split}, {})
    assert plan.schedule.stage_ranks == (0, 1, 1, 0)


def test_settings_reach_the_schedule() -> None:
    settings = {"pp": 2, "virtual_stages": 2, "microbatch_group": 3, "schedule": "interleaved-1f1b"}
    plan = planned(settings, {}, microbatches=5)
    assert plan.schedule.stage_ranks == (0, 1, 0, 1)
    visited = [(a.microbatch, a.stage // 2) for a in plan.schedule.actions(0) if a.phase == "F"]
    assert visited == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    model, batch = gpt(True), tokens(5, columns=8)
    assert_equal(run(plan, model, batch), plain(model, batch, next_token_loss), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["interleaved-1f1b", "eager-interleaved-1f1b", "looped-bfs"])
@pytest.mark.parametrize(("ranks", "each"), [(1, 3), (2, 3), (3, 2), (2, 4)])
def test_any_number_of_stages_a_rank(family: str, ranks: int, each: int) -> None:
    model, batch = gpt(True, layers=7).double(), tokens(3, columns=8)
    parallel = stretto.Parallel(pp=ranks, microbatches=3, virtual_stages=each, schedule=family)
    plan = stretto.plan(stretto.capture(model, batch, next_token_loss, parallel), cores())
    assert (plan.ranks, len(plan.job.stages)) == (ranks, ranks * each)
    assert_equal(run(plan, model, batch), plain(model, batch, next_token_loss), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("family", PLACES)
def test_few_microbatches_on_two_to_eight_stages_are_proved(family: str) -> None:
    """With sends that are waited for at once, and with messages that go in the order of their sends."""
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 2, 3):
            job = replace(make_job(ranks * PLACES[family].usual, microbatches), pp=ranks)
            for overlap in ("off", "local"):
                plan = make_plan(job, make_costs(job, latency_us=30.0), schedule=family, overlap=overlap)
                verify(plan)
                assert len(plan.orders) == ranks


def test_each_rank_reads_only_what_its_stages_use() -> None:
    """A rank needs no more of the model than its stages: the rest may be dropped."""
    plan = planned({"pp": 2, "schedule": "zb-h1"}, {}, microbatches=4)
    model, batch = gpt(True), tokens(4, columns=8)

    def only(rank: int) -> nn.Module:
        part = copy.deepcopy(model)
        needed = {p.name for p in plan.job.parameters if rank in p.stages}
        for name, parameter in list(part.named_parameters()):
            if name not in needed:
                owner, _, last = name.rpartition(".")
                setattr(
                    part.get_submodule(owner), last, nn.Parameter(torch.empty_like(parameter, device="meta"))
                )
        return part

    def work(runner: stretto.Runner) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = runner.step(batch)
        return loss, {n: p.grad for n, p in runner.named_parameters() if p.grad is not None}

    assert_same_bits(gather(model, stretto.run_threads(plan, only, work)), run(plan, model, batch))
