"""Schedules and numbers of stages that users choose: they reach the plan, or are refused before it runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.models.gpt import next_token_loss
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

SPLIT = ["blocks.1", "blocks.2", "norm"]
CSVS = {
    "other stages": (4, None, "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "has 2 stages, but the job has 4"),
    "no actions": (3, 2, "0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n", "rank 1 of the schedule 'csv' has no stage"),
    "a deadlock": (2, None, "0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n", "1F1"),
}
"""Pipeline ranks, stages, the file, and what is said of it."""
SETTINGS: list[tuple[dict[str, Any], int | None, str]] = [
    ({"schedule": "zb-v", "virtual_stages": 3}, None, "2 stages a rank, not virtual_stages = 3"),
    ({"schedule": "1f1b", "split": SPLIT}, None, "schedule '1f1b' has 1 stage a rank"),
    ({"virtual_stages": 3, "split": SPLIT}, None, "makes 4 stages, .* virtual_stages = 3 make 6"),
    (
        {"schedule": "1f1b"},
        3,
        "3 stages for pp = 2 ranks, and schedule '1f1b' has 1 stage a rank, on each equally many",
    ),
]


def planned(settings: dict[str, Any], more: dict[str, Any], microbatches: int = 2) -> stretto.Plan:
    parallel = stretto.Parallel(microbatches=microbatches, **settings)
    job = stretto.capture(gpt(True), tokens(microbatches, columns=8), next_token_loss, parallel, **more)
    return stretto.plan(job, cores())


@pytest.mark.parametrize("name", CSVS)
def test_a_file_that_cannot_run_is_refused_before_it_runs(name: str, tmp_path: Path) -> None:
    ranks, stages, text, word = CSVS[name]
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises((stretto.UsageError, stretto.PlanError), match=word):
        planned({"pp": ranks, "schedule": str(path)}, {"stages": stages})


@pytest.mark.parametrize(("settings", "stages", "word"), SETTINGS)
def test_stages_that_ranks_cannot_have_are_refused(
    settings: dict[str, Any], stages: int | None, word: str
) -> None:
    with pytest.raises((stretto.UsageError, stretto.PlanError), match=word):
        planned({"pp": 2, **settings}, {"stages": stages})


def test_a_family_takes_the_stages_that_another_cannot() -> None:
    plan = planned({"pp": 2, "schedule": "zb-v", "split": SPLIT}, {})
    assert plan.schedule.stage_ranks == (0, 1, 1, 0)


def test_settings_reach_the_schedule() -> None:
    settings = {"pp": 2, "virtual_stages": 2, "microbatch_group": 3, "schedule": "interleaved-1f1b"}
    plan = planned(settings, {}, microbatches=5)
    assert plan.schedule.stage_ranks == (0, 1, 0, 1)
    visited = [(a.microbatch, a.stage // 2) for a in plan.schedule.actions(0) if a.phase == "F"]
    assert visited == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    model, batch = gpt(True), tokens(5, columns=8)
    assert_equal(run(plan, model, batch), plain(model, batch, next_token_loss), 1e-5)


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
