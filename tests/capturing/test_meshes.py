"""A program on several meshes, run eagerly and captured into a plan, on the same processes: same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import stretto
from stretto.capturing.captures import Captures
from stretto.ir.action import Phase
from stretto.ir.program import Job
from tests.capturing.test_mesh_reshards import F64, MICROBATCHES, SIZE, Pair, batch, loss_of
from tests.cells import slow
from tests.clusters import cores
from tests.tensor.lone import single_rank
from tests.tensor.world import all_end_well

LR = 0.1
R = Replicate()
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class OnMeshes(nn.Module):
    """A layer on each mesh."""

    def __init__(self, meshes: list[DeviceMesh]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in meshes)
        for layer, mesh in zip(self.layers, meshes, strict=True):
            stretto.shard(layer, mesh, [R])
        self.meshes = meshes

    def to(self, place: int, x: torch.Tensor) -> torch.Tensor:
        return stretto.reshard(x, self.meshes[place], [R])  # type: ignore[arg-type]


class Skip(OnMeshes):
    """Three layers; what the first makes is used by the second and the third."""

    early = back = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        if self.early:
            skipped = self.to(2, first)
        second = torch.tanh(self.layers[1](self.to(1, first)))
        if not self.early:
            skipped = self.to(2, first)
        third = self.layers[2](self.to(2, second) + skipped)
        return self.layers[0](self.to(0, third)) if self.back else third


class Sine(OnMeshes):
    """The second layer uses what the first mesh makes of its buffer."""

    table: torch.Tensor

    def __init__(self, meshes: list[DeviceMesh]) -> None:
        super().__init__(meshes)
        self.register_buffer("table", torch.linspace(-1.0, 1.0, SIZE, dtype=F64))
        self.table = stretto.shard(self.table, meshes[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, sine = torch.tanh(self.layers[0](x)), torch.sin(self.table)
        first, sine = stretto.reshard_all([(t, self.meshes[1], [Replicate()]) for t in (first, sine)])
        return self.layers[1](first * sine)


def masked(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the elements that count, of which microbatches have unequal numbers."""
    kept = given["y"] > 0.3
    mesh = model.meshes[-1]
    off = (model(given["x"]) - stretto.shard(given["y"], mesh)) * stretto.shard(kept.to(F64), mesh)
    return off.square().sum(), kept.sum()


def meshes_of(size: int = 1) -> list[DeviceMesh]:
    ranks = range(0, dist.get_world_size(), size)
    return [DeviceMesh("cpu", list(range(rank, rank + size))) for rank in ranks]


def parts(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """What this rank keeps of tensors on meshes."""
    found = {name: stretto.local(tensor.detach()) for name, tensor in tensors.items() if tensor is not None}
    return {name: part for name, part in found.items() if part is not None}


def agree(make: Callable[[list[DeviceMesh]], nn.Module], size: int = 1, loss: Any = loss_of) -> Job:
    """Loss, gradients by part and an SGD step of the one and the other."""
    meshes, given = meshes_of(size), batch()
    eager, model = make(meshes), make(meshes)
    if loss is masked:
        total, count = loss(eager, given)
        value = total / float(count)
    else:
        x, y = (stretto.shard(given[k], meshes[at], [R]) for k, at in (("x", 0), ("y", -1)))
        value = loss(eager, {"x": x, "y": y})
    value.backward()
    everywhere = DeviceMesh("cpu", list(range(dist.get_world_size())))
    expected = stretto.local(stretto.reshard(value.detach(), everywhere, [R]))  # type: ignore[arg-type]
    assert expected is not None
    # As they are on parameters: an eager gradient may still be partial.
    resident = {name: p for name, p in eager.named_parameters() if p.grad is not None}
    grads = parts({n: p.grad.redistribute(p.device_mesh, p.placements) for n, p in resident.items()})
    assert grads, "every rank has a stage"

    layout = {"pp": len(meshes), "tp": size, "schedule": "1f1b", "overlap": "off"}
    parallel = stretto.Parallel(microbatches=MICROBATCHES, **layout)  # type: ignore[arg-type]
    job = stretto.capture(model, given, loss, parallel)
    plan = stretto.plan(job, cluster=cores())
    stretto.verify(plan)
    runner = stretto.Runner(plan, model)
    for _ in range(2):
        for parameter in runner.parameters():
            parameter.grad = None
        torch.testing.assert_close(runner.step(given), expected.reshape(()), **CLOSE)
        found = {name: p.grad for name, p in runner.named_parameters()}
        torch.testing.assert_close(found, grads, **CLOSE)

    # The runner's parameters are the model's own memory: a step of theirs is seen by the program.
    torch.optim.SGD(runner.parameters(), lr=LR).step()
    before, after = parts(dict(eager.named_parameters())), parts(dict(model.named_parameters()))
    for name, grad in grads.items():
        torch.testing.assert_close(after[name], before[name] - LR * grad, **CLOSE)
    runner.close()
    return job


def a_skip() -> None:
    check_skip(agree(Skip))


def check_skip(job: Job) -> None:
    assert [p.stages for p in job.parameters] == [(k // 2,) for k in range(6)]
    edges = {(e.source, e.target) for e in job.edges}
    assert {(0, 1), (0, 2), (1, 2)} <= edges, edges


def what_a_buffer_gives_is_made_where_it_lies() -> None:
    job = agree(Sine)
    (sine,) = [op for op in job.stages[0].ops[Phase.F] if op.target == "aten.sin.default"]
    assert [(b.name, b.stages) for b in job.buffers] == [("table", (0,))]
    assert sine.name in [edge.value for edge in job.edges if (edge.source, edge.target) == (0, 1)]


def a_sum_with_its_count() -> None:
    check_skip(agree(Skip, loss=masked))


def a_reshard() -> None:
    agree(lambda meshes: Pair(meshes, Partial(), Shard(1)), 2)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (2, "what_a_buffer_gives_is_made_where_it_lies"),
        (3, "a_sum_with_its_count"),
        slow(3, "a_skip"),
        slow(4, "a_reshard"),
    ],
)
def test_eager_and_captured_agree(ranks: int, name: str) -> None:
    all_end_well([(ranks, f"tests.capturing.test_meshes:{name}")])


def test_meshes_are_the_stages_where_planning_may_choose_their_number() -> None:
    with single_rank(1, 3):
        model = Skip(meshes_of())
        model.more = nn.ModuleList(copy.deepcopy(model.layers[0]) for _ in range(6))
        chosen = stretto.Parallel(pp=3, microbatches=MICROBATCHES, schedule="auto", virtual_stages="auto")
        assert Captures(model, batch(), loss_of).stages(chosen) == (3,)
