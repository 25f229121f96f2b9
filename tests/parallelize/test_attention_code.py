"""Attention as models of other libraries write it, under tp: rotary angles as complex numbers, and
cross-attention whose code counts heads by an attribute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError
from tests.parallelize.equality import assert_plan_is_plain

pytestmark = pytest.mark.filterwarnings("ignore:the tensor-parallel plan of:UserWarning")

HIDDEN, HEADS, WIDTH, LENGTH, KEYS = 16, 4, 4, 5, 3
PLAN = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


def paired(x: Tensor, angles: Tensor) -> Tensor:
    by = torch.polar(torch.ones_like(angles), angles.detach()) * (1 + angles - angles.detach())
    turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * by
    return torch.view_as_real(turned).flatten(-2)


def halved(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.complex(*x.chunk(2, -1)) * torch.complex(angles.cos(), angles.sin())
    return torch.cat((turned.real, turned.imag), -1)


def conjugated(x: Tensor, angles: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2).contiguous()).conj() * torch.complex(
        angles.cos(), angles.sin()
    )
    return torch.stack((turned.abs(), turned.imag), -1).flatten(-2)


ROTATIONS = {"paired": paired, "halved": halved, "conjugated": conjugated}


class Rotary(nn.Module):
    def __init__(self, rotate: Callable[[Tensor, Tensor], Tensor], learned: bool) -> None:
        super().__init__()
        self.rotate = rotate
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        angles = torch.outer(torch.arange(LENGTH), torch.tensor([1.0, 0.1]))[:, None]
        if learned:
            self.angles = nn.Parameter(angles)
        else:
            self.register_buffer("angles", angles)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        q, k, v = (m(batch["x"]).unflatten(-1, (-1, WIDTH)) for m in (self.q, self.k, self.v))
        q, k = (self.rotate(x, self.angles) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """One module around the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = Cross()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] + self.cross(batch)  # type: ignore[no-any-return]


class Cross(nn.Module):
    """Queries of one sequence, keys of another, and a bias of as many heads as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, memory = batch["x"], batch["memory"].tanh()
        q, k, v = (
            m(a).view(*a.shape[:2], -1, WIDTH).transpose(1, 2)
            for m, a in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        bias = torch.zeros(1, self.heads, x.shape[1], memory.shape[1], dtype=x.dtype)
        scores = q @ k.transpose(-1, -2) + (bias + batch["mask"][:, None, None])
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def check(model: nn.Module, plan: dict[str, str], **layout: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(4, LENGTH, HIDDEN, generator=generator, dtype=torch.float64),
        "memory": torch.randn(4, KEYS, HIDDEN, generator=generator, dtype=torch.float64),
        "mask": torch.tensor([[0.0, 0.0, -9.0]] * 4, dtype=torch.float64),
    }
    model = model.double()
    job = capture(model, batch, loss_of, Parallel(microbatches=2, **layout), tp_plan=plan)
    made = stretto.plan(job, stretto.Cluster(), order="list")
    assert_plan_is_plain(made, copy.deepcopy(model), loss_of, batch)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotary_angles_are_complex_numbers(rotation: str, learned: bool) -> None:
    torch.manual_seed(0)
    check(Rotary(ROTATIONS[rotation], learned), PLAN, tp=4 if learned else 2)


def test_cross_attention_counts_heads_by_an_attribute() -> None:
    """As T5's does. The refusal says what to write, and that works."""
    torch.manual_seed(0)
    plan = {f"cross.{name}": style for name, style in PLAN.items()}
    said = r"write \{'cross': 'attributes:heads'\} if they count heads, or write"
    with pytest.raises(CaptureError, match=said):
        check(Decoder(), plan, tp=2)
    check(Decoder(), {**plan, "cross": "attributes:heads"}, tp=2)


def test_a_complex_number_in_the_code_is_refused_with_the_way_out() -> None:
    with pytest.raises(CaptureError, match=r"(?s)the number 1j, .* multiply by torch.complex\(real, imag\)"):
        check(Rotary(lambda x, a: halved(x, a) * torch.exp(1j * a).abs().repeat(1, 1, 2), True), PLAN, tp=2)
