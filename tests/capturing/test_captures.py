"""A trace that is used again gives the job that a capture of its own gives."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import stretto
from stretto.capturing import trace as tracing
from stretto.capturing.captures import TRACED_BY, Captures, traced_by
from stretto.config import GPTSettings, Parallel, ParallelSettings
from stretto.ir.forms import forms_of
from stretto.ir.plan import Plan
from stretto.models.build import build_model, counted_loss_function
from tests.cells import slow
from tests.clusters import cores

MODEL = GPTSettings(layers=4, hidden=32, heads=4, context=16, vocab_size=64)
PARALLELS = (
    Parallel(pp=2, microbatches=4),
    Parallel(pp=4, microbatches=4, schedule="zb-h1", max_live=4),
    Parallel(pp=2, microbatches=2, dp=2, schedule="interleaved-1f1b", virtual_stages=2),
    Parallel(pp=1, microbatches=1, dp=4, recompute="full", overlap="local"),
    Parallel(pp=2, microbatches=4, split=["blocks.1"], split_ops=True),
)
"""All of four pieces: one trace serves them."""


def step_us(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_us


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An item for each trace."""
    seen: list[object] = []
    export = tracing.torch_adapter.export_joint
    monkeypatch.setattr(
        tracing.torch_adapter, "export_joint", lambda *args: (seen.append(args), export(*args))[1]
    )
    return seen


def given() -> tuple[Any, torch.Tensor, Any]:
    with torch.device("meta"):
        model = build_model(MODEL, 64, 0)
    return model, torch.empty(8, 17, dtype=torch.int64, device="meta"), counted_loss_function(MODEL)


@pytest.mark.parametrize("parallels", [PARALLELS[2:3], slow(PARALLELS)], ids=len)
def test_one_trace_gives_the_jobs_of_captures_of_their_own(
    parallels: tuple[Parallel, ...], traced: list[object]
) -> None:
    alone = [stretto.capture(*given(), parallel) for parallel in parallels]
    traced.clear()
    captures = Captures(*given())
    assert [captures.job(parallel) for parallel in parallels] == alone
    assert len(traced) == 1
    captures.job(Parallel(pp=2, microbatches=2))  # other rows
    assert len(traced) == 2


def test_all_layouts_are_made_of_one_trace(traced: list[object]) -> None:
    captures = Captures(*given())
    for how in ({}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"ampipe_degree": 2}):
        captures.job(Parallel(microbatches=4, **how))
    assert len(traced) == 1


def test_what_a_trace_does_not_depend_on_is_known_by_name() -> None:
    """A new setting has to be put in one of the two lists."""
    after = {"pp", "dp", "microbatches", "schedule", "virtual_stages", "stages", "microbatch_group", "split"}
    after |= {"max_live", "overlap", "split_ops", "recompute", "zero", "dp_shard", "updates", "clip_norm"}
    after |= {"owners"}
    assert after | set(TRACED_BY) == set(ParallelSettings.model_fields)
    assert traced_by(Parallel(dp=2, microbatches=2)) == traced_by(Parallel(pp=2, microbatches=4))
    assert traced_by(Parallel(tp=2)) != traced_by(Parallel())


def test_planning_chooses_among_one_two_and_four_stages_a_rank(traced: list[object]) -> None:
    for pp, stages in ((1, [1, 2, 4]), (4, [4])):
        parallel = Parallel(pp=pp, microbatches=4, schedule="auto", virtual_stages="auto")
        job = stretto.capture(*given(), parallel)
        assert [len(form.stages) for form in forms_of(job)] == stages
    assert len(traced) == 2


def test_the_fastest_of_the_numbers_of_stages_is_planned() -> None:
    parallel = Parallel(pp=2, microbatches=4, schedule="auto", virtual_stages="auto")
    job = stretto.capture(*given(), parallel)
    assert [len(form.stages) for form in forms_of(job)] == [2, 4]
    cluster = cores()
    found = stretto.plan(job, cluster, order="list")
    alone = [step_us(stretto.plan(form, cluster, order="list")) for form in forms_of(job)]
    assert step_us(found) == min(alone)
    assert re.search(r"; [24] stages, [0-9.]+ ms, as [24] take ", found.schedule_why)
    assert len(stretto.plan(job, cluster, schedule="zb-v", order="list").job.stages) == 4, (
        "which no other number has"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "1f1b"}, "give that schedule, or a number"),
        ({"schedule": "auto", "stages": 4}, "drop one"),
        ({"schedule": "auto", "split": ["blocks.1"]}, "drop one"),
    ],
)
def test_what_leaves_no_choice_of_stages_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(stretto.UsageError, match=message):
        Parallel(pp=2, microbatches=4, virtual_stages="auto", **given)
