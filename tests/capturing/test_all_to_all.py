"""PyTorch's functional all-to-all in a model's code: a start and a wait of the program, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from stretto.capturing import torch_adapter
from stretto.capturing.convert import convert
from stretto.errors import CaptureError
from stretto.ir.program import Op, Ref
from tests.tensor.lone import lone_rank

ROWS, WIDTH = 6, 4


class Exchanging(nn.Module):
    """A layer whose result is exchanged. sizes: what an end sends to each, and gets from each."""

    def __init__(self, sizes: Sequence[list[int] | None]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.sizes = sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = all_to_all_single_autograd(self.layer(x), *self.sizes, dist.group.WORLD)  # type: ignore[arg-type]
        return made * 2


def converted(sizes: Sequence[list[int] | None] = (None, None), world: int = 2, ranks: int = 2) -> list[Op]:
    model = Exchanging(sizes)
    mode = torch_adapter.fake_mode()
    with lone_rank(0, world):
        with mode:
            x = torch.empty(ROWS, WIDTH)
        with torch_adapter.fake_state(model, mode, torch.device("cpu"), None):
            joint, _ = torch_adapter.export_joint(
                model, lambda model, x: model(x).sum(), lambda leaves: leaves[0], [x], mode, None, None, None
            )
        names = {node: f"{kind}/{key}" for node, (kind, key) in joint.inputs.items()}
        ops, _ = convert(joint, names, (), ranks)
    return [traced.op for traced in ops]


def test_it_is_a_start_and_a_wait_and_its_gradient_goes_back_so() -> None:
    ops = converted()
    starts = [op for op in ops if op.kind is not None]
    assert [op.target for op in starts] == ["comm.all_to_all"] * 2
    for start in starts:
        assert isinstance(start.args[0], Ref)
        assert start.args[1:] == ("tp", 2)
        assert [str(spec) for spec in start.outputs] == [f"float32[{ROWS},{WIDTH}]"]
        (wait,) = (op for op in ops if op.target == "comm.wait" and op.uses == (start.name,))
        assert wait.alias == start.name


def test_what_a_program_cannot_have_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"different sizes, \[4, 2\] rows to send and \[3, 3\] to receive"):
        converted(([3, 3], [4, 2]))
    with pytest.raises(CaptureError, match="all-to-all is of 3 ranks, and the model is spread over tp = 2"):
        converted(world=3)
    with pytest.raises(CaptureError, match="all-to-all is of 2 ranks, and the model is spread over tp = 1"):
        converted(ranks=1)
