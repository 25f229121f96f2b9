"""What no rule computes on slices is computed in full: users are told where, and refused where it is most."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError
from tests.parallelize.equality import assert_plain

HIDDEN, INNER, LENGTH = 8, 16, 6

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self, between: nn.Module | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        inner = inner.cumsum(-1) if self.between is None else self.between(inner)
        return x + self.down(inner.sigmoid())  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Along channels, each of which reads all others."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Conv1d(INNER, INNER, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *between: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, between))
        self.gate = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.gate(x).softmax(-1)  # which every rank computes: that is the plan


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def captured(model: nn.Module) -> Any:
    x = torch.randn(4, LENGTH, HIDDEN, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = capture(model, x, square, Parallel(tp=2, microbatches=2), tp_plan=PLAN)
    return job, x, [str(one.message) for one in caught if "computes on slices" in str(one.message)]


def test_where_ranks_gather_for_want_of_a_rule_is_said_once_for_all_layers() -> None:
    torch.manual_seed(0)
    model = Model(None, None).double()
    job, x, (said,) = captured(model)
    nbytes = 2 * 2 * LENGTH * INNER * 8  # of two blocks, a microbatch's two rows
    assert f"cumsum in blocks.* ({nbytes:,} bytes a microbatch)" in said
    assert_plain(job, model, square, x)


def test_what_the_plan_replicates_is_not_said() -> None:
    assert captured(Model(nn.GELU(), nn.GELU()).double())[2] == []


def test_a_step_that_ranks_would_compute_in_full_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)% of its flops are computed in full.*convolution in blocks"):
        captured(Model(Mixed(), Mixed()).double())
