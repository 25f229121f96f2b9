"""Parameters of which ops read copies in another dtype, made once a step where they are read first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from tests.capturing.zoo import mean_square
from tests.clusters import cores

ROWS, WIDE = 8, 6
MICROBATCHES = 2
DATA = torch.linspace(-1, 2, ROWS * 4).reshape(ROWS, 4)


class _InBackward(torch.autograd.Function):
    """Its backward alone reads two of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale, shift)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, shift = ctx.saved_tensors
        return grads[0] * scale, (grads[0] * x).sum(0), (grads[0] + shift).sum(0)


class ReadLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, WIDE)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, WIDE))
        self.shift = nn.Parameter(torch.linspace(1, 2, WIDE))
        self.out = nn.Linear(WIDE, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = _InBackward.apply(self.into(x), self.scale, self.shift)  # type: ignore[no-untyped-call]
        out: Tensor = self.out(hidden)
        return out


@pytest.mark.parametrize("layout", [{}, {"pp": 2}, {"updates": True}], ids=str)
def test_copies_that_only_the_backward_reads_are_made_before_it(layout: dict[str, Any]) -> None:
    """One op makes those of a stage, and parts of what it makes are taken in a later window."""
    torch.manual_seed(0)
    model = ReadLate()
    parallel = stretto.Parallel(microbatches=MICROBATCHES, **layout)
    plan = stretto.plan(
        stretto.capture(model, DATA, mean_square, parallel, precision="bf16"), cores(), order="list"
    )
    windows = [w for w in plan.windows.values() if not w.actions and w.name.startswith("0UNSHARD")]
    assert len(windows) == 2

    def step(runner: stretto.Runner) -> dict[str, Tensor]:
        runner.step(DATA)
        if runner.optimizer is None:
            torch.optim.SGD(runner.parameters(), lr=1.0).step()
        return {name: p.detach() for name, p in runner.named_parameters()}

    how: dict[str, Any] = (
        {"optimizer": lambda ps: torch.optim.SGD(ps, lr=1.0)} if layout.get("updates") else {}
    )
    found: dict[str, Tensor] = {}
    for rank in stretto.run_threads(plan, lambda _: copy.deepcopy(model), step, **how):
        found |= rank
    plain = copy.deepcopy(model).bfloat16()
    grads = {name: torch.zeros(p.shape) for name, p in plain.named_parameters()}
    for rows in DATA.bfloat16().chunk(MICROBATCHES):
        plain.zero_grad()
        (mean_square(plain, rows) / MICROBATCHES).backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            grads[name] += p.grad.float()
    assert found.keys() == grads.keys()
    for name, p in model.named_parameters():
        assert torch.equal(found[name], p.detach() - grads[name]), name
