"""CTC with lengths that are data: PyTorch's loss and gradients, in shapes that are known beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto import Parallel, capture
from stretto.backend.ctc_adapter import LOSS, PYTORCHS
from tests.parallelize.equality import assert_plain


def given(packed: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(1, 10, (4, 6), generator=generator)
    lengths = torch.tensor([4, 3, 6, 2])
    if packed:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths.tolist(), strict=True)])
    return {
        "x": torch.randn(4, 14, 8, generator=generator, dtype=torch.float64),
        "targets": targets,
        "steps": torch.tensor([14, 12, 13, 9]),
        "lengths": lengths,
    }


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).tanh()).tanh()).log_softmax(-1)  # type: ignore[no-any-return]


def loss_of(**how: Any) -> Any:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(batch["x"]).transpose(0, 1)
        return F.ctc_loss(log_probs, batch["targets"], batch["steps"], batch["lengths"], **how).mean()

    return loss


LAYOUTS: tuple[dict[str, Any], ...] = ({"pp": 2, "microbatches": 2}, {"tp": 2}, {"dp": 2})
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"zero_infinity": True, "reduction": "sum"},
    {"reduction": "none", "blank": 9},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("how", HOW)
def test_a_step_is_the_plain_models(how: dict[str, Any], layout: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model, batch, loss = Speech().double(), given(), loss_of(**how)
    if how.get("blank"):
        batch["targets"] %= 9
    if how.get("zero_infinity"):
        batch["steps"][2] = 3  # too short for its six symbols: endless without the option
    plan = {"up": "colwise", "down": "rowwise"} if layout.get("tp") else None
    assert_plain(capture(model, batch, loss, Parallel(**layout), tp_plan=plan), model, loss, batch)


def test_lengths_may_change_from_step_to_step() -> None:
    model, loss = Speech().double(), loss_of()
    job = capture(model, given(), loss, Parallel(pp=2, microbatches=2))
    batch = given()
    batch["lengths"], batch["steps"] = torch.tensor([6, 1, 2, 5]), torch.tensor([13, 14, 8, 14])
    assert_plain(job, model, loss, batch)


@pytest.mark.parametrize("packed", [False, True])
def test_the_op_is_pytorchs_with_room_for_longer_targets(packed: bool) -> None:
    batch = given(packed)
    log_probs = torch.randn(14, 4, 10, dtype=torch.float64).log_softmax(-1)
    rest = (batch["targets"], batch["steps"], batch["lengths"], 0, False)
    (found, room), (expected, kept) = LOSS(log_probs, *rest), PYTORCHS(log_probs, *rest)
    assert torch.equal(found, expected)
    assert room.shape == (4, 14, 2 * (15 if packed else 6) + 1)
    backward, of = torch.ops.aten._ctc_loss_backward.Tensor, (found, torch.ones(4, dtype=torch.float64))
    one, other = (backward(of[1], log_probs, *rest[:3], found, each, 0, False) for each in (room, kept))
    assert torch.equal(one, other)
    with torch.device("meta"):
        shapes = [torch.empty_like(x, device="meta") for x in (of[1], log_probs, *rest[:3], found, room)]
    assert backward(*shapes, 0, False).shape == log_probs.shape
