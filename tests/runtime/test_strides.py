"""A kernel may lay its result out otherwise than its shape function said when the step was captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from tests.runtime.equality import assert_equal, plain, plan_of, run


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
