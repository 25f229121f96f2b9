"""Programs on several meshes that no plan has: input, error, key word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.runtime.transport import ThreadTransport
from tests.capturing.test_mesh_reshards import (
    F64,
    FULL,
    MICROBATCHES,
    S1,
    SIZE,
    Pair,
    R,
    batch,
    captured,
    loss_of,
)
from tests.capturing.test_meshes import Skip, meshes_of
from tests.clusters import cores
from tests.tensor.lone import single_rank

Meshes = list[DeviceMesh]
TWO = [[0, 1], [2, 3]]


class Strange(nn.Module):
    """One layer on each of the first two meshes; `act` is done to the first one's result."""

    def __init__(self, meshes: Meshes, act: Callable[[Tensor, Meshes], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(2))
        for layer, mesh in zip(self.layers, meshes, strict=False):
            stretto.shard(layer, mesh, FULL * mesh.ndim)
        self.meshes, self.act = meshes, act

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.layers[0](x), self.meshes)
        return self.layers[1](stretto.reshard(h, self.meshes[1], [Replicate()]))  # type: ignore[arg-type,no-any-return]


LAYOUTS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([[0], [1, 2]], {}, "on a mesh of 1 ranks, [0], and 'layers.1.weight' on one of 2, [1, 2]"),
    ([[0, 2], [1, 3]], {}, "ranks [0, 2], [1, 3]; its 2 stages are at ranks [0, 1], [2, 3]"),
    ([[1, 0], [2, 3]], {}, "ranks [1, 0], [2, 3]; its 2 stages are at ranks [0, 1], [2, 3]"),
    ([TWO, [[4, 5], [6, 7]]], {}, "'layers.0.weight' is on a mesh of 2 axes"),
    (TWO, {"tp": 1}, "give Parallel(pp=2, tp=2)"),
    (TWO, {"dp": 2}, "with dp=1 and no split"),
    (TWO, {"split": ["layers.1"]}, "with dp=1 and no split"),
    (TWO, {"sequence_parallel": True}, "sequence_parallel spreads a plain model"),
    (TWO, {"tp_plan": {"layers.0": "colwise"}}, "tp_plan spreads a plain model"),
    ([[0], [1]], {"tp": 1, "ampipe_degree": 2}, "ampipe_degree = 2 changes a plain model"),
    ([[0], [1]], {"tp": 1, "cp": 2, "zero": 1}, "cp = 2 changes a plain model"),
    ([[0], [1]], {"tp": 1, "ampipe_degree": "auto"}, "ampipe_degree = 'auto' changes a plain model"),
]


def capture_strange(ranks: list[Any], act: Any = lambda h, _: h, **changed: Any) -> None:
    parallel = stretto.Parallel(**({"pp": 2, "tp": 2, "microbatches": MICROBATCHES} | changed))
    with single_rank(0, 8):
        model = Strange([DeviceMesh("cpu", one) for one in ranks], act)
        stretto.capture(model, batch(), loss_of, parallel)


@pytest.mark.parametrize(("ranks", "changed", "word"), LAYOUTS)
def test_meshes_that_are_no_stages(ranks: list[Any], changed: dict[str, Any], word: str) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        capture_strange(ranks, **changed)
    assert word in str(caught.value)


def own_way(h: Tensor, meshes: Meshes) -> Tensor:
    full = all_reduce(stretto.local(h.detach()), "sum", (meshes[0], 0))  # type: ignore[no-untyped-call]
    return h + stretto.shard(full, meshes[0])


ACTS: list[tuple[list[Any], Callable[[Tensor, Meshes], Tensor], str]] = [
    (TWO, lambda h, on: stretto.reshard(h[:, :5], on[1], [Shard(1)]), "5 is not a multiple of 2"),  # type: ignore[arg-type]
    ([*TWO, [4, 5]], lambda h, on: stretto.reshard(h, on[2], [R]), "no parameter lies"),  # type: ignore[arg-type]
    (TWO, own_way, "_c10d_functional.all_reduce"),
]


@pytest.mark.parametrize(("ranks", "act", "word"), ACTS)
def test_code_on_meshes(ranks: list[Any], act: Callable[[Tensor, Meshes], Tensor], word: str) -> None:
    with pytest.raises(stretto.CaptureError) as caught:
        capture_strange(ranks, act)
    assert word in str(caught.value)


class Odd(nn.Module):
    def __init__(self, meshes: Meshes, placement: Placement, buffer: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in meshes)
        for layer, mesh in zip(self.layers, meshes, strict=True):
            layer.register_buffer("seen", torch.zeros(6))
            layer.weight = stretto.shard(layer.weight, mesh, [placement])
            layer.bias = stretto.shard(layer.bias, mesh, FULL)
            layer.seen = stretto.shard(layer.seen, mesh, [Shard(0)] if buffer else FULL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placement", "buffer", "word"),
    [
        (Shard(0), False, "of shape [5, 5] cannot be sharded equally over tp = 2"),
        (Partial(), False, "parameter 'layers.0.weight' lies as [Partial()]"),
        (Replicate(), True, "buffer 'layers.0.seen' lies as [Shard(0)]"),
    ],
)
def test_placements_that_no_plan_has(placement: Placement, buffer: bool, word: str) -> None:
    with pytest.raises(stretto.UsageError) as caught:
        captured(lambda meshes: Odd(meshes, placement, buffer))
    assert word in str(caught.value)


def changed_skip(meshes: Meshes, **changed: Any) -> nn.Module:
    model = Skip(meshes)
    for name, value in changed.items():
        setattr(model, name, value)
    return model


def half_plain(meshes: Meshes) -> nn.Module:
    model = Skip(meshes)
    model.layers[1] = nn.Linear(SIZE, SIZE, dtype=F64)
    return model


PROGRAMS: list[tuple[Callable[[Meshes], nn.Module], str]] = [
    (lambda on: Skip(on[::-1]), "never reshards a tensor to the mesh of rank 2"),
    (lambda on: changed_skip(on, early=True), "reaches the meshes of ranks [2], [1] in this order"),
    (lambda on: changed_skip(on, back=True), "never back"),
    (half_plain, "'layers.1.weight' is on no mesh"),
    (lambda on: changed_skip(on, to=lambda place, x: x), "its tensors are on two meshes"),
]


@pytest.mark.parametrize(("make", "word"), PROGRAMS)
def test_programs(make: Callable[[Meshes], nn.Module], word: str) -> None:
    parallel = stretto.Parallel(pp=3, microbatches=MICROBATCHES)
    with single_rank(1, 3), pytest.raises((stretto.UsageError, stretto.CaptureError)) as caught:
        stretto.capture(make(meshes_of()), batch(), loss_of, parallel)
    assert word in str(caught.value)


def test_a_count_of_what_ranks_have_parts_of() -> None:
    with single_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        model = nn.Linear(SIZE, SIZE, dtype=F64)
        stretto.shard(model, mesh)

        def loss(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            x, y = (stretto.shard(given[key], mesh, [Shard(0)]) for key in ("x", "y"))
            return model(x).square().sum(), y.square().sum()

        with pytest.raises(stretto.CaptureError, match="not made from the microbatch alone"):
            stretto.capture(model, batch(), loss, stretto.Parallel(pp=1, tp=2, microbatches=2))


def test_a_model_that_lies_otherwise_than_at_the_capture() -> None:
    plan = stretto.plan(captured(lambda meshes: Pair(meshes, S1, R)), cluster=cores())
    with single_rank(1, 4):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        model = Pair(meshes, S1, R)
        model.a.bias = stretto.shard(nn.Parameter(torch.zeros(SIZE, dtype=F64)), meshes[0], FULL)  # type: ignore[assignment]
        with pytest.raises(stretto.UsageError, match=r"'a.bias' as parts of shape \[4\]"):
            stretto.Runner(plan, model, transport=ThreadTransport.group(4)[1])
    with single_rank(1, 3):
        on = meshes_of()
        parallel = stretto.Parallel(pp=3, microbatches=MICROBATCHES, schedule="1f1b")
        plan = stretto.plan(stretto.capture(Skip(on), batch(), loss_of, parallel), cluster=cores())
        moved = Skip([on[1], on[2], on[0]])
        with pytest.raises(stretto.UsageError, match=r"'layers.1.weight' on rank 1, but it is on mesh \[2\]"):
            stretto.Runner(plan, moved, transport=ThreadTransport.group(3)[1])
