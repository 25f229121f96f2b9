"""Matrices that are made of others, or packed: ranks have parts of what they are made of, and gather none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stretto import Parallel, capture
from stretto.ir.program import Job, Shard
from tests.parallelize.equality import assert_plain

PLAN = {"up": "colwise", "down": "rowwise"}


Change = Callable[[nn.Module], nn.Module]


class Mlp(nn.Module):
    def __init__(self, changed: Change = lambda module: module, pieces: int = 1) -> None:
        super().__init__()
        self.up, self.down = changed(nn.Linear(8, 12 * pieces)), changed(nn.Linear(12, 8))
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.up(x).chunk(self.pieces, dim=-1)
        for one in others:
            first = first.tanh() * one
        return self.down(first)  # type: ignore[no-any-return]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).cos().mean()  # type: ignore[no-any-return]


def captured(model: nn.Module, **layout: Any) -> tuple[Job, Tensor]:
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # capture says what ranks gather
        return capture(model, x, loss, Parallel(tp=2, **layout), tp_plan=PLAN), x


@pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_normed_matrices(how: Change) -> None:
    torch.manual_seed(2)
    model = Mlp(how).double()
    job, x = captured(model)
    assert_plain(job, model, loss, x)


def test_lengths_are_sharded_with_the_rows_whose_they_are() -> None:
    job, _ = captured(Mlp(parametrizations.weight_norm).double())
    at = {p.name: p.shards for p in job.parameters}
    assert at["up.parametrizations.weight.original0"] == (Shard("tp", 0),)
    assert at["up.parametrizations.weight.original1"] == (Shard("tp", 0),)
    assert at["down.parametrizations.weight.original0"] == ()
    assert at["down.parametrizations.weight.original1"] == (Shard("tp", 1),)


@pytest.mark.parametrize("pieces", [2, 3])
def test_matrices_that_one_packs_are_seen_where_they_are_split(pieces: int) -> None:
    torch.manual_seed(2)
    model = Mlp(pieces=pieces).double()
    job, x = captured(model)
    assert_plain(job, model, loss, x)
    assert next(p.shards for p in job.parameters if p.name == "up.weight") == (Shard("tp", 0, blocks=pieces),)
