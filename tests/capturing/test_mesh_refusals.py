"""Programs on meshes of several ranks that no plan has: the message says what, where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.runtime.transport import ThreadTransport
from tests.capturing.test_mesh_reshards import (
    F64,
    MICROBATCHES,
    S1,
    SIZE,
    WHOLE,
    Pair,
    R,
    batch,
    captured,
    loss_of,
)
from tests.tensor.lone import lone_rank


class Strange(nn.Module):
    """One layer on each of the first two meshes; `act` is done to the first one's result."""

    def __init__(
        self, meshes: list[DeviceMesh], act: Callable[[torch.Tensor, list[DeviceMesh]], torch.Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(2))
        for layer, mesh in zip(self.layers, meshes, strict=False):
            stretto.shard(layer, mesh, WHOLE * mesh.ndim)
        self.meshes, self.act = meshes, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.layers[0](x), self.meshes)
        return self.layers[1](stretto.reshard(h, self.meshes[1], [Replicate()]))  # type: ignore[arg-type,no-any-return]


def refused(
    message: str,
    ranks: list[Any],
    act: Any = lambda h, _: h,
    kind: type[Exception] = stretto.UsageError,
    **changed: Any,
) -> None:
    parallel = stretto.Parallel(**({"pp": 2, "tp": 2, "microbatches": MICROBATCHES} | changed))
    with lone_rank(0, 8):
        model = Strange([DeviceMesh("cpu", one) for one in ranks], act)
        with pytest.raises(kind, match=message):
            stretto.capture(model, batch(), loss_of, parallel)


def test_meshes_that_are_no_stages_are_refused() -> None:
    two = [[0, 1], [2, 3]]
    refused(
        r"on a mesh of 1 ranks, \[0\], and 'layers.1.weight' on one of 2, \[1, 2\].*one size", [[0], [1, 2]]
    )
    refused(r"ranks \[0, 2\], \[1, 3\]; its 2 stages are at ranks \[0, 1\], \[2, 3\]", [[0, 2], [1, 3]])
    refused(r"ranks \[1, 0\], \[2, 3\]; its 2 stages are at ranks \[0, 1\], \[2, 3\]", [[1, 0], [2, 3]])
    refused(
        r"'layers.0.weight' is on a mesh of 2 axes, \[\[0, 1\], \[2, 3\]\]",
        [[two[0], two[1]], [[4, 5], [6, 7]]],
    )
    refused(r"on 2 meshes of 2 ranks.*give Parallel\(pp=2, tp=2\).*not pp=2, tp=1", two, tp=1)
    refused(r"give Parallel\(pp=2, tp=2\) with dp=1 and no split, not pp=2, tp=2, dp=2", two, dp=2)
    refused("sequence_parallel spreads a plain model, and this one is on meshes", two, sequence_parallel=True)
    for degree in (2, "auto"):
        message = f"ampipe_degree = {degree!r} changes a plain model.*Give ampipe_degree = 1"
        refused(message, [[0], [1]], tp=1, ampipe_degree=degree)
    refused("tp_plan spreads a plain model", two, tp_plan={"layers.0": "colwise"})


def test_what_no_plan_has_is_refused() -> None:
    two = [[0, 1], [2, 3]]

    def uneven(h: torch.Tensor, meshes: list[DeviceMesh]) -> torch.Tensor:
        return stretto.reshard(h[:, :5], meshes[1], [Shard(1)])  # type: ignore[arg-type]

    whole = r"tensor float64 \(4, 5\) \[Replicate\(\)\] on mesh \[0, 1\]"
    message = whole + " cannot be sharded equally over tp = 2 along dim 1: 5 is not a multiple of 2.*pad"
    refused(message, two, uneven, stretto.CaptureError)

    def elsewhere(h: torch.Tensor, meshes: list[DeviceMesh]) -> torch.Tensor:
        return stretto.reshard(h, meshes[2], [Replicate()])  # type: ignore[arg-type]

    message = r"a mesh of ranks \[4, 5\], on which no parameter lies"
    refused(message, [*two, [4, 5]], elsewhere, stretto.CaptureError)

    def own_way(h: torch.Tensor, meshes: list[DeviceMesh]) -> torch.Tensor:
        whole = all_reduce(stretto.local(h.detach()), "sum", (meshes[0], 0))  # type: ignore[no-untyped-call]
        return h + stretto.shard(whole, meshes[0])

    refused(
        "communicates in a way of its own.*_c10d_functional.all_reduce", two, own_way, stretto.CaptureError
    )

    class Odd(nn.Module):
        def __init__(self, meshes: list[DeviceMesh], placement: Placement, buffer: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in meshes)
            for layer, mesh in zip(self.layers, meshes, strict=True):
                layer.register_buffer("seen", torch.zeros(6))
                layer.weight = stretto.shard(layer.weight, mesh, [placement])
                layer.bias = stretto.shard(layer.bias, mesh, WHOLE)
                layer.seen = stretto.shard(layer.seen, mesh, [Shard(0)] if buffer else WHOLE)  # type: ignore[arg-type]

    lies = r"parameter 'layers.0.weight' lies as \[Partial\(\)\].*as Shard\(dim\) or Replicate\(\)"
    for placement, buffer, message in (
        (Shard(0), False, r"'layers.0.weight' of shape \[5, 5\] cannot be sharded equally over tp = 2 along"),
        (Partial(), False, lies),
        (Replicate(), True, r"buffer 'layers.0.seen' lies as \[Shard\(0\)\].*it lies as Replicate\(\)"),
    ):
        with pytest.raises(stretto.UsageError, match=message):
            captured(lambda meshes, p=placement, b=buffer: Odd(meshes, p, b))


def test_a_model_that_lies_otherwise_than_at_the_capture_is_refused() -> None:
    job = captured(lambda meshes: Pair(meshes, S1, R))
    plan = stretto.plan(job, cluster=stretto.Cluster())
    with lone_rank(1, 4):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        model = Pair(meshes, S1, R)
        model.a.bias = stretto.shard(nn.Parameter(torch.zeros(SIZE, dtype=F64)), meshes[0], WHOLE)  # type: ignore[assignment]
        message = r"'a.bias' as parts of shape \[4\], and part 1 on rank 1, but it is tensor float64 \(8,\)"
        with pytest.raises(stretto.UsageError, match=message):
            stretto.Runner(plan, model, transport=ThreadTransport.group(4)[1])
