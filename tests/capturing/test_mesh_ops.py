"""Ops on meshes that DTensor is not trusted with, in a captured program: numbers are the plain model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from tests.capturing.test_mesh_reshards import MICROBATCHES, ROWS, SIZE, assert_as_plain, batch, captured

F64 = torch.float64


class Between(nn.Module):
    """A matrix cut by columns on the first mesh, ops on what it gives, and one on the second."""

    def __init__(self, meshes: list[DeviceMesh] | None, act: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(2))
        self.table = nn.Embedding(6, SIZE, dtype=F64)
        self.meshes, self.act = meshes, act
        if meshes is not None:
            stretto.shard(self.a, meshes[0], [Shard(0)])
            stretto.shard(self.table, meshes[0], [Shard(0)])
            stretto.shard(self.b, meshes[1], [Replicate()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(torch.tanh(self.a(x)), self.table)
        if self.meshes is not None:
            h = stretto.reshard(h, self.meshes[1], [Replicate()])  # type: ignore[arg-type]
        out: torch.Tensor = self.b(h)
        return out


def places(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    found: torch.Tensor = h.cumsum(1) + h.flip(1) * h.roll(1, 1) + h.sort(1)[0]
    return found


def rows_of_tables(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    """Two lookups, of which the first is used after the second."""
    rows = torch.arange(len(h)) % (ROWS // MICROBATCHES)
    first, second = table(rows), table(5 - rows)
    found: torch.Tensor = h * first + second * first
    return found


def attention(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    q = h.view(len(h), 2, SIZE // 4, 2)
    return F.scaled_dot_product_attention(q, q * 2, q.flip(3)).reshape(len(h), SIZE)


def written(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
    made = h * 1
    made.index_add_(1, torch.tensor([0, 5, 5]), h[:, 2:5])
    return made.cumprod(1)


@pytest.mark.parametrize("act", [places, rows_of_tables, attention, written])
def test_ops(act: Callable[..., torch.Tensor]) -> None:
    job = captured(lambda meshes: Between(meshes, act))
    assert_as_plain(job, lambda: Between(None, act))


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_rows_that_do_not_count(placement: Placement) -> None:
    """One row of each microbatch is ignored, and so one of two of the first rank's."""
    given = batch()
    given["y"] = torch.arange(ROWS) * 5 % SIZE
    given["y"][:: ROWS // MICROBATCHES] = -100

    def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        out, y = model(given["x"]), given["y"]
        assert isinstance(model, Between)
        if model.meshes is not None:
            out = stretto.reshard(out, model.meshes[1], [placement])
            y = stretto.shard(y, model.meshes[1], [placement])
        return F.cross_entropy(out, y)

    job = captured(lambda meshes: Between(meshes, places), given=given, loss=loss)
    assert_as_plain(job, lambda: Between(None, places), given, loss)


def test_a_write_that_would_be_lost_is_refused() -> None:
    def lost(h: torch.Tensor, table: nn.Module) -> torch.Tensor:
        made = h * 1
        made[:, 1:3] = 0.0
        return made

    with pytest.raises(stretto.CaptureError, match=r"made\[:, 1:3\] = 0.0(.|\n)*gathered copy"):
        captured(lambda meshes: Between(meshes, lost))
