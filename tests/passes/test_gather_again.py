"""Sequences are gathered again for the backward when asked for: less is kept, the numbers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stretto.ir.action import Phase
from stretto.ir.flow import inputs_of
from stretto.ir.program import Job, Op
from stretto.passes.recompute import repeat
from stretto.passes.recompute_choice import gathers
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.parallelize.equality import MODELS, batch_of, step
from tests.passes.test_passes import job_of
from tests.passes.test_split_ops import costs_of


def again(job: Job) -> Job:
    return repeat(job, {stage.index: gathers(stage) for stage in job.stages})


def kept_bytes(job: Job) -> int:
    """Of storages that the forward keeps for the backward."""
    total = 0
    for stage in job.stages:
        made = {op.name: op for op in stage.ops[Phase.F]}
        read = {name for phase in (Phase.I, Phase.W) for name in inputs_of(stage, phase) if name in made}
        owners = {made[name].alias or name for name in read}
        total += sum(made[name].nbytes for name in owners if name in made)
    return total


def all_gathers(job: Job, phase: Phase) -> list[Op]:
    """Of sequences: that of the cross-entropy, a few numbers for a token, is not needed again."""
    found = [op for stage in job.stages for op in stage.ops[phase] if op.target == "comm.all_gather"]
    largest = max((op.nbytes for op in found), default=0)
    return [op for op in found if op.nbytes == largest]


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize(
    ("name", "pp"),
    [("gpt", 2), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in ("gpt", "llama", "gpt2"))],
)
def test_slices_are_kept_and_numbers_stay(name: str, pp: int, rows: int) -> None:
    job = job_of(name, 2, True, pp, rows=rows)
    changed = again(job)
    forward = len(all_gathers(job, Phase.F))
    assert forward >= 5, "two a layer, and the head's"
    both = [len(all_gathers(changed, phase)) - len(all_gathers(job, phase)) for phase in (Phase.I, Phase.W)]
    assert sum(both) == forward
    assert both[1] >= forward - 1, "a weight's gradient alone needs them; they stand beside it"
    # Of each gather the half of a rank is kept, where it was not kept anyway (a norm's result is not).
    gathered = sum(op.nbytes for op in all_gathers(job, Phase.F))
    assert kept_bytes(job) - kept_bytes(changed) >= 0.5 * gathered - 1
    batch, model = batch_of(rows), MODELS[name]().double()
    (loss, grads), (told, found) = step(job, model, batch), step(changed, model, batch)
    assert torch.equal(told, loss)
    assert found.keys() == grads.keys()
    assert all(torch.equal(found[key], want) for key, want in grads.items())


def test_a_plan_gathers_again_when_asked() -> None:
    job = job_of("gpt", 2, True)
    plan = make_plan(replace(job, recompute="gathers"), costs_of(job))
    verify(plan)
    assert len(all_gathers(plan.job, Phase.W)) >= 4
    assert plan.job.recompute == "gathers"


def test_nothing_is_gathered_again_where_nothing_is_gathered() -> None:
    job = job_of("gpt", 2, False)
    assert again(job) == job
