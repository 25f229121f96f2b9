"""What is computed again is ordered with everything else: it runs under collectives, and numbers stay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.ir.plan import ItemKind, Plan
from stretto.ir.program import WAIT
from stretto.models.gpt import next_token_loss
from stretto.passes.recompute import is_repeated
from stretto.planning.make_plan import make_plan
from stretto.verifying import verify
from tests.order.test_order_equality import costs_of, numbers
from tests.parallelize.equality import batch_of, gpt

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp sp": {"tp": 2, "sequence_parallel": True, "microbatches": 4},
    "pp tp": {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "1f1b"},
}

CASES = [
    ("tp sp", "selective", "window"),
    ("tp sp", "gathers", "window"),
    ("pp tp", "full", "window"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("tp sp", "full", "window"),
            ("tp sp", "full", "local"),
            ("tp sp", "gathers", "local"),
            ("pp tp", "full", "local"),
            ("pp tp", "selective", "window"),
        )
    ),
]


def again_under_collectives(plan: Plan) -> int:
    """How many repeated ops that take time stand between a collective's start and its wait."""
    ops = {
        (stage.index, op.name): op for stage in plan.job.stages for made in stage.ops.values() for op in made
    }
    found = 0
    for window in plan.windows.values():
        flying: set[tuple[int, str]] = set()
        for item in window.items:
            if item.kind is not ItemKind.OP:
                continue
            key = (window.parts[item.part][0], str(item.ref))
            op = ops[key]
            if op.collective is not None:
                flying.add(key)
            elif op.target == WAIT:
                flying.discard((key[0], op.uses[0]))
            elif flying and is_repeated(op) and plan.costs.op_us.get(key):
                found += 1
    return found


@pytest.mark.parametrize(("layout", "choice", "mode"), CASES)
def test_numbers_are_those_of_off_without_recomputation(layout: str, choice: str, mode: Any) -> None:
    model = gpt(dropout=0.1).double()
    job = capture(model, batch_of(), next_token_loss, Parallel(**LAYOUTS[layout]))
    plain = make_plan(job, costs_of(job), overlap="off")
    assert not any(is_repeated(op) for stage in plain.job.stages for ops in stage.ops.values() for op in ops)
    plan = make_plan(replace(job, recompute=choice), costs_of(job), overlap=mode)
    verify(plan)
    assert plan.overlap == mode
    assert plan.job.recompute == choice
    if choice != "gathers":  # those are collectives themselves
        assert again_under_collectives(plan)
    for (loss, grads), (want_loss, want) in zip(numbers(plan, model), numbers(plain, model), strict=True):
        assert torch.equal(loss, want_loss)
        assert grads.keys() == want.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, want[name]), name
