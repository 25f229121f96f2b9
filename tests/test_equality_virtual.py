"""Families with several stages a rank: loss and all gradients are the plain model's, and equal bit by bit.

The jobs are captured in as many stages, one cut for all families, so that sums are regrouped nowhere. A plan
is made as users make it: `verify` proves it, with messages that go in order and sends that wait for their
receives (overlap "off" waits for each at once), and ranks are threads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import stretto
from stretto.ir.plan import Plan
from stretto.ir.stage_maps import PLACES
from stretto.models.gpt import next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.clusters import cores
from tests.runtime.equality import (
    Result,
    assert_equal,
    assert_same_bits,
    batch_of,
    gpt,
    job_of,
    loss_of,
    model_of,
    plain,
    plan_of,
    run,
    tokens,
    traced,
)
from tests.synthetic import make_costs, make_job

RANKS, STAGES = 2, 4


def plan_for(family: str, name: str, microbatches: int, overlap: str, stages: int = STAGES) -> Plan:
    job = job_of(traced(name, torch.float64), stages, microbatches)
    places = PLACES.get(family)
    ranks = stages if places is None else stages // places.usual
    return plan_of(replace(job, pp=ranks, overlap=overlap), family)


@cache
def check(family: str, name: str, microbatches: int, overlap: str, stages: int = STAGES) -> Result:
    model, batch = model_of(name, torch.float64), batch_of(name, microbatches)
    plan = plan_for(family, name, microbatches, overlap, stages)
    verify(plan)
    assert plan.overlap == "off" or overlap != "off"
    found = run(plan, model, batch)
    assert_equal(found, plain(model, batch, loss_of(name, torch.float64)), 1e-10)
    return found


@pytest.mark.parametrize("family", PLACES)
def test_every_family_equals_the_plain_model(family: str) -> None:
    """Microbatches fewer than a warm-up, and one more than a multiple of the ranks."""
    for microbatches, overlap in ((1, "off"), (3, "window")):
        found = check(family, "gpt tied", microbatches, overlap)
        assert_same_bits(found, check("gpipe", "gpt tied", microbatches, overlap))


@pytest.mark.slow
@pytest.mark.parametrize("family", PLACES)
@pytest.mark.parametrize("name", ["gpt", "llama", "qwen2", "gpt2"])
def test_families_models_and_microbatches(name: str, family: str) -> None:
    for microbatches in (1, 2, 3, 8):
        for overlap in ("off", "local", "window"):
            found = check(family, name, microbatches, overlap)
            assert_same_bits(found, check("1f1b", name, microbatches, overlap))


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
                verify(make_plan(job, make_costs(job, latency_us=30.0), schedule=family, overlap=overlap))


def test_settings_reach_the_schedule() -> None:
    model, batch = gpt(True).double(), tokens(5, columns=8)
    parallel = stretto.Parallel(
        pp=2, microbatches=5, virtual_stages=2, microbatch_group=3, schedule="interleaved-1f1b"
    )
    plan = stretto.plan(stretto.capture(model, batch, next_token_loss, parallel), cores())
    assert plan.schedule.stage_ranks == (0, 1, 0, 1)
    visited = [(a.microbatch, a.stage // 2) for a in plan.schedule.actions(0) if a.phase == "F"]
    assert visited == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    assert_equal(run(plan, model, batch), plain(model, batch, next_token_loss), 1e-10)


def test_stages_that_a_family_cannot_have_are_refused() -> None:
    def capture(**settings: object) -> stretto.Job:
        parallel = stretto.Parallel(pp=2, microbatches=2, **settings)
        return stretto.capture(gpt(True), tokens(2, columns=8), next_token_loss, parallel)

    with pytest.raises(stretto.UsageError, match="'zb-v' has 2 stages a rank, not virtual_stages = 3: give"):
        capture(schedule="zb-v", virtual_stages=3)
    job = capture(schedule="1f1b", split=["blocks.1", "blocks.2", "norm"])
    with pytest.raises(
        stretto.UsageError,
        match="4 stages, 2 on each of pp = 2 ranks, and schedule '1f1b' has 1 stage a rank",
    ):
        stretto.plan(job, cores())
    assert stretto.plan(job, cores(), schedule="zb-v").schedule.stage_ranks == (0, 1, 1, 0)
    with pytest.raises(
        stretto.UsageError, match="makes 4 stages, but pp = 2 and virtual_stages = 3 make 6; "
    ):
        capture(virtual_stages=3, split=["blocks.1", "blocks.2", "norm"])
    odd = stretto.capture(
        gpt(True), tokens(2, columns=8), next_token_loss, stretto.Parallel(pp=2, microbatches=2), stages=3
    )
    with pytest.raises(stretto.UsageError, match="3 stages, and '1f1b' gives each of pp = 2 ranks equally"):
        stretto.plan(odd, cores(), schedule="1f1b")
