"""Reshards between stages of several ranks: the captured step computes what the plain model does.

One process captures as one rank of a world of four; the plan's ranks then run as threads, each with a plain
copy of the model of which it takes its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.ir.program import Job
from stretto.runtime.local import run_threads
from stretto.runtime.shards import part_of
from tests.tensor.lone import lone_rank

F64 = torch.float64
ROWS, SIZE, MICROBATCHES = 16, 8, 4
COLUMNS, ROWWISE, WHOLE = [Shard(0)], [Shard(1)], [Replicate()]


class Pair(nn.Module):
    """Two matrices on each of two meshes, the first cut by columns and the second by rows.

    source: how the first mesh's result lies when it is resharded; target: how it arrives.
    """

    def __init__(self, meshes: list[DeviceMesh] | None, source: Placement, target: Placement) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(SIZE, SIZE, dtype=F64) for _ in range(4))
        self.norm = nn.LayerNorm(SIZE, dtype=F64)
        self.meshes, self.source, self.target = meshes, source, target
        if meshes is not None:
            first, second = meshes
            for up, down, mesh in ((self.a, self.b, first), (self.c, self.d, second)):
                stretto.shard(up, mesh, COLUMNS)
                down.weight = stretto.shard(down.weight, mesh, ROWWISE)
                down.bias = stretto.shard(down.bias, mesh, WHOLE)
            stretto.shard(self.norm, second, WHOLE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if self.source != Shard(1):
            h = self.b(h) if not self.source.is_partial() else F.linear(h, self.b.weight)
        if self.source in (Replicate(), Shard(0)):
            h = self.reshard(h, 0, self.source)
        h = self.reshard(h, 1, self.target)
        h = self.d(torch.tanh(self.c(h)))
        return self.norm(h)  # type: ignore[no-any-return]

    def reshard(self, x: torch.Tensor, place: int, placement: Placement) -> torch.Tensor:
        return x if self.meshes is None else stretto.reshard(x, self.meshes[place], [placement])  # type: ignore[arg-type]


def batch() -> dict[str, torch.Tensor]:
    made = torch.sin(torch.arange(2 * ROWS * SIZE, dtype=F64)).reshape(2, ROWS, SIZE)
    return {"x": made[0], "y": made[1]}


def loss_of(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def captured(make: Callable[[list[DeviceMesh]], nn.Module], rank: int = 0, **changed: Any) -> Job:
    """The job of a model on the meshes of ranks 0, 1 and 2, 3, captured by one of them."""
    settings: dict[str, Any] = {"pp": 2, "tp": 2, "microbatches": MICROBATCHES, "schedule": "1f1b"}
    with lone_rank(rank, 4):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        return stretto.capture(make(meshes), batch(), loss_of, stretto.Parallel(**(settings | changed)))


def assert_as_plain(job: Job, make: Callable[[], nn.Module]) -> None:
    """The plan's ranks, as threads, have the plain model's loss and their parts of its gradients."""
    plan = stretto.plan(job, cluster=stretto.Cluster())
    stretto.verify(plan)
    plain = make()
    expected = loss_of(plain, batch())
    expected.backward()
    whole = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    about = {parameter.name: parameter for parameter in job.parameters}

    def work(runner: stretto.Runner) -> int:
        torch.testing.assert_close(runner.step(batch()), expected.detach(), rtol=1e-10, atol=1e-10)
        found = list(runner.named_parameters())
        for name, parameter in found:
            part = part_of(whole[name], about[name], job, runner.coordinates)
            assert parameter.grad is not None
            torch.testing.assert_close({name: parameter.grad}, {name: part}, rtol=1e-10, atol=1e-10)
        return len(found)

    models = [make() for _ in range(plan.world)]  # not in the threads, which share one generator
    counts = run_threads(plan, lambda rank: models[rank], work)
    assert sum(counts[::2]) == sum(counts[1::2]) == len(whole)


def collectives(job: Job, stage: int) -> list[str]:
    """The kinds of collectives in a stage's forward."""
    return [op.collective.kind for op in job.stages[stage].ops["F"] if op.collective is not None]


S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


@pytest.mark.parametrize(
    ("source", "target", "schedule", "overlap"),
    [
        (S1, R, "1f1b", "window"),
        (R, R, "zb-h1", "off"),
        (R, S1, "1f1b", "off"),
        (P, R, "zb-h1", "window"),
        (P, S1, "1f1b", "window"),
        (S1, S0, "zb-h1", "window"),
        (S0, S1, "1f1b", "off"),
        (S0, S0, "1f1b", "window"),
        (S1, P, "1f1b", "off"),
    ],
)
def test_reshards(source: Placement, target: Placement, schedule: str, overlap: str) -> None:
    job = captured(lambda meshes: Pair(meshes, source, target), schedule=schedule, overlap=overlap)
    assert_as_plain(job, lambda: Pair(None, source, target))
