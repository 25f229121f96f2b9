"""Windows in which several parts are one microbatch's: they read what it left in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.capturing.trace import trace
from stretto.config import Parallel
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Plan
from stretto.verifying import verify
from tests.capturing.zoo import Chain, mean_square, rows
from tests.runtime.equality import assert_equal, job_of, lowered, plain, plan_of, run
from tests.verifying.plans import hand_schedule


def with_weights_first(plan: Plan, name: str) -> Plan:
    """The window with the ops of W as early as what they read allows."""
    window = plan.windows[name]
    ops = {op.name: op for made in plan.job.stages[0].ops.values() for op in made}
    left = list(window.items)
    here = {str(item.ref) for item in left}
    made: set[str] = set()
    order: list[Item] = []

    def ready(item: Item) -> bool:
        return all(used in made or used not in here for used in ops[str(item.ref)].uses)

    while left:
        assert all(item.kind is ItemKind.OP for item in left)
        weights = [item for item in left if window.parts[item.part][1] is Phase.W and ready(item)]
        taken = weights[0] if weights else next(item for item in left if ready(item))
        left.remove(taken)
        made.add(str(taken.ref))
        order.append(taken)
    return replace(plan, windows={**plan.windows, name: replace(window, items=tuple(order))})


@pytest.mark.parametrize("orders", ["0F0 (0I0;0W0)OVERLAP_F_B", "(0F0;0I0;0W0)OVERLAP_F_B"])
def test_w_may_read_before_i_what_both_need(orders: str) -> None:
    """Between two layers, I reads what tanh made for its own gradient, and W for the next layer's."""
    model, batch = Chain(), rows(8)
    found = trace(model, batch, mean_square, microbatches=1)
    plan = lowered(job_of(found, 1, 1), hand_schedule((0,), 1, orders))
    [name] = [name for name in plan.windows if "+" in name]
    early = with_weights_first(plan, name)
    assert early.windows[name].items != plan.windows[name].items
    verify(early)
    assert_equal(run(early, model, batch), plain(model, batch, mean_square), 1e-10)


# A kernel may lay its result out otherwise than its shape function said when the step was captured.


class Transposed(nn.Module):
    """Softplus is given its gradient transposed: on CPU its kernel keeps those strides, its shape function
    does not, and the gradient of the matrix before it is a product of views of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.outer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(F.softplus(self.inner(x)).transpose(1, 2))
        return found.square().mean()


def square_loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x)
    return value


def test_a_view_of_a_result_with_other_strides() -> None:
    torch.manual_seed(0)
    model = Transposed().double()
    batch = torch.randn(2, 5, 6, dtype=torch.float64)
    job = capture(model, batch, square_loss, Parallel())
    ops = {op.name: op for stage in job.stages for made in stage.ops.values() for op in made}
    views = [op for op in ops.values() if op.target == "aten.view.default"]
    assert any(
        ops[op.uses[0]].target == "aten.softplus_backward.default" for op in views if op.uses[0] in ops
    )
    assert_equal(run(plan_of(job), model, batch), plain(model, batch, square_loss), 1e-12)
