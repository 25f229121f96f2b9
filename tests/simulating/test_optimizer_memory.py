"""The optimizer's state is a part of what a rank has: counted by hand, proved, limited, and said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import stretto
from stretto.config import Parallel
from stretto.ir.parameters import STATES, OptimizerKind
from stretto.ir.program import Job
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.simulating import predict, simulate
from stretto.verifying.memory import peak_bytes
from tests.clusters import cores
from tests.simulating.test_engine import schedule
from tests.synthetic import WEIGHT, make_costs, make_job
from tests.synthetic import make_plan as synthetic_plan

CONFIG = GPTConfig(vocab_size=64, layers=2, hidden=32, heads=2, context=16, tie_embeddings=True)
BATCH = torch.zeros(4, 17, dtype=torch.int64)


@pytest.mark.parametrize(("kind", "tensors"), STATES.items())
def test_a_weight_has_so_many_tensors_beside_it(kind: OptimizerKind, tensors: int) -> None:
    plan = synthetic_plan(schedule("0F0 0B0", "1F0 1B0"))
    more = replace(plan, job=replace(plan.job, optimizer=kind))
    for rank in range(2):
        assert simulate(more).peak_bytes[rank] == simulate(plan).peak_bytes[rank] + tensors * WEIGHT.nbytes
        assert peak_bytes(more, rank) == simulate(more).peak_bytes[rank]
    parts = predict(more).memory
    assert parts["parameters"] == parts["gradients"] == (WEIGHT.nbytes,) * 2
    assert parts["optimizer"] == (tensors * WEIGHT.nbytes,) * 2


def job_of(model: nn.Module | None = None, precision: str = "float32", **layout: int) -> Job:
    model = GPT(CONFIG) if model is None else model
    parallel = Parallel(microbatches=2, **layout)  # type: ignore[arg-type]
    return stretto.capture(model, BATCH, next_token_loss, parallel, precision=precision)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_parts_of_a_rank_are_those_of_its_tensors(precision: str) -> None:
    """A tied table is on both ranks, once each; averages have the weights' own dtype, whatever computes."""
    model = GPT(CONFIG)
    plan = stretto.plan(job_of(model, precision, pp=2), cores(), order="list")
    assert plan.prediction is not None
    parts = plan.prediction.memory
    table = model.get_parameter(plan.job.parameters[0].tied_to).nbytes
    own = sum(p.nbytes for p in model.parameters()) + table
    assert sum(parts["gradients"]) == own
    assert sum(parts["optimizer"]) == 2 * own
    assert sum(parts["parameters"]) >= own * (1.5 if precision == "bf16" else 1)
    assert all(activations > 0 for activations in parts["activations"])
    sums = [sum(each) for each in zip(*parts.values(), strict=True)]
    assert sums == list(plan.prediction.peak_bytes)
    assert "(optimizer: adamw)" in str(plan)


def test_what_is_frozen_has_no_state() -> None:
    model = GPT(CONFIG)
    for parameter in list(model.parameters())[2:]:
        parameter.requires_grad_(False)
    plan = stretto.plan(job_of(model), cores(), order="list")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert plan.prediction is not None
    assert plan.prediction.memory["optimizer"] == (2 * trained,)


def test_a_device_that_has_no_room_for_the_state_is_too_small() -> None:
    job = job_of(pp=2)
    most = max(stretto.plan(job, cores(), order="list", optimizer="sgd").prediction.peak_bytes)  # type: ignore[union-attr]
    small = cores(memory_bytes=most)
    assert stretto.plan(job, small, order="list", optimizer="sgd").job.optimizer == "sgd"
    with pytest.raises(stretto.PlanError, match=r"keeps [\d,]+ bytes, [\d,]+ more than the limit"):
        stretto.plan(job, small, order="list")
    with pytest.raises(stretto.UsageError, match="muon"):
        stretto.plan(job, cores(), optimizer="muon")  # type: ignore[arg-type]
    plan = stretto.plan(job, cores(), order="list")
    with pytest.raises(stretto.PlanError, match=r"optimizer's state \(adamw\)"):
        stretto.verify(plan, most)


def test_an_order_is_found_within_the_room_that_the_state_leaves() -> None:
    job = replace(make_job(2, 8), optimizer="adamw")
    costs = make_costs(job)
    least = max(make_plan(job, costs, schedule="1f1b").prediction.peak_bytes)  # type: ignore[union-attr]
    made = make_plan(replace(job, schedule="auto"), costs, max_bytes=least)
    assert made.prediction is not None
    assert max(made.prediction.peak_bytes) <= least
