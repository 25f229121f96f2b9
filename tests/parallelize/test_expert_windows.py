"""Forwards and backwards of different microbatches share windows whatever their layers are: dense beside
sparse, stages of unequal numbers of layers, anything recomputed. Numbers stay those of the plain model, and
steps get shorter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stretto.ir.collectives import PRICED
from stretto.ir.costs import CollectiveCost, Costs
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import WAIT, Job, OverlapMode
from stretto.ir.transfers import is_free
from stretto.models.moe import moe_token_sum
from stretto.planning.make_plan import make_plan
from tests.parallelize.equality import plain_step
from tests.parallelize.mixtures import DROPLESS, FEW, batch, captured, model_of, step
from tests.runtime.equality import made_up_costs

ALL_TO_ALL_US = 400.0
"""About as long as the ops between two of them: a few of attention or of experts hide a part of it."""


def costs_of(job: Job) -> Costs:
    """Every op takes 10 us and more, views and waits nothing, and gradient reductions next to nothing."""
    costs = made_up_costs(job)
    free = {
        (stage.index, op.name)
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
        if is_free(op) or op.target == WAIT
    }
    took = {kind: ALL_TO_ALL_US if kind.startswith("all_to_all") else 1.0 for kind in PRICED}
    collectives = {
        (axis, kind): CollectiveCost(Curve(((0.0, us),))) for axis, _ in job.axes for kind, us in took.items()
    }
    op_us = {key: us for key, us in costs.op_us.items() if key not in free}
    return replace(costs, op_us=op_us, collectives=collectives, action_us=0.0)


SPARSE, MIXED, FIRST_DENSE = (2, 0), (2, 2), (3, 3)
"""Layers, and which of them are dense."""

CASES = [
    (MIXED, FEW, {"recompute": "selective"}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (SPARSE, FEW, {}),
            (MIXED, FEW, {"pp": 2, "recompute": "full"}),
            (MIXED, FEW, {}),
            (FIRST_DENSE, FEW, {"pp": 2, "recompute": "full"}),
            (SPARSE, DROPLESS, {"recompute": "selective"}),
            (MIXED, DROPLESS, {"recompute": "full"}),
            (MIXED, FEW, {"pp": 2}),
            (MIXED, FEW, {"pp": 2, "schedule": "zb-h1"}),
            (FIRST_DENSE, FEW, {"recompute": "selective"}),
            (FIRST_DENSE, FEW, {"pp": 2}),
            (FIRST_DENSE, DROPLESS, {"pp": 2, "schedule": "zb-h1", "recompute": "selective"}),
            (FIRST_DENSE, FEW, {"ampipe_degree": 2, "ampipe_capacity": "whole", "recompute": "full"}),
            (MIXED, FEW, {"pipe_experts": True}),
        )
    ),
]


@pytest.mark.parametrize(("layers", "capacity", "how"), CASES, ids=str)
def test_any_mix_of_layers(layers: tuple[int, int], capacity: float | None, how: dict[str, Any]) -> None:
    model = model_of(capacity, shared=1, dense_every=layers[1], layers=layers[0])
    if capacity is DROPLESS:
        how = {**how, "ep_buffer": 4.0}
    job = captured(model, ep=2, dp=2, microbatches=4, **how)

    def planned(overlap: OverlapMode) -> Plan:
        return make_plan(job, costs_of(job), overlap=overlap)

    off, local, window = planned("off"), planned("local"), planned("window")
    steps = [plan.prediction.step_us for plan in (off, local, window) if plan.prediction is not None]
    loss, grads = step(window, model)
    other_loss, other_grads = step(off, model)
    assert torch.equal(loss, other_loss)
    want_loss, want = plain_step(model, moe_token_sum, batch(), 8)
    assert abs(loss - want_loss) <= 1e-10 * abs(want_loss)
    for name, grad in want.items():
        assert torch.equal(grads[name], other_grads[name]), name
        assert (grads[name] - grad).norm() <= 1e-10 * max(float(grad.norm()), 1e-3), name
    assert window.overlap == "window", window.overlap_why
    assert steps[2] <= 0.95 * steps[1] <= 0.95 * steps[0]
