"""A program on meshes of two ranks, run eagerly and captured into a plan, on the same processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from tests.capturing.test_mesh_reshards import F64, MICROBATCHES, SIZE, Pair, batch, loss_of
from tests.tensor.world import all_end_well

LR = 0.1

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


class Three(nn.Module):
    """A layer on each of three meshes; what the first makes goes to both others, whole and in parts."""

    def __init__(self, meshes: list[DeviceMesh]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, dtype=F64) for _ in meshes)
        for layer, mesh in zip(self.layers, meshes, strict=True):
            stretto.shard(layer, mesh, [Shard(0)])
        self.meshes = meshes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](self.to(1, first, R)))
        third = self.layers[2](self.to(2, second, R))
        out: torch.Tensor = third + self.to(2, first, S1)
        return out

    def to(self, place: int, x: torch.Tensor, placement: Placement) -> torch.Tensor:
        return stretto.reshard(x, self.meshes[place], [placement])  # type: ignore[arg-type]


def meshes_of_two() -> list[DeviceMesh]:
    return [DeviceMesh("cpu", [rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]


def parts(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """What this rank holds of tensors on meshes."""
    found = {name: stretto.local(tensor.detach()) for name, tensor in tensors.items() if tensor is not None}
    return {name: part for name, part in found.items() if part is not None}


def agree(eager: nn.Module, model: nn.Module, schedule: str, overlap: str) -> None:
    """Loss, gradients by part and an SGD step of the one and the other. Both have equal parameters."""
    meshes, given = meshes_of_two(), batch()
    on_meshes = {
        "x": stretto.shard(given["x"], meshes[0], [R]),
        "y": stretto.shard(given["y"], meshes[-1], [R]),
    }
    loss = loss_of(eager, on_meshes)
    loss.backward()
    everywhere = DeviceMesh("cpu", list(range(dist.get_world_size())))
    expected = stretto.local(stretto.reshard(loss.detach(), everywhere, [R]))  # type: ignore[arg-type]
    assert expected is not None
    # As they lie on parameters: an eager gradient may still be a sum over ranks.
    grads = parts(
        {
            name: parameter.grad.redistribute(parameter.device_mesh, parameter.placements)
            for name, parameter in eager.named_parameters()
            if parameter.grad is not None
        }
    )
    assert grads, "every rank has a stage"

    parallel = stretto.Parallel(
        pp=len(meshes), tp=2, microbatches=MICROBATCHES, schedule=schedule, overlap=overlap
    )
    plan = stretto.plan(stretto.capture(model, given, loss_of, parallel), cluster=stretto.Cluster())
    stretto.verify(plan)
    runner = stretto.Runner(plan, model)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(runner.step(given), expected.reshape(()), **close)
    torch.testing.assert_close({name: p.grad for name, p in runner.named_parameters()}, grads, **close)

    # The runner's parameters are the model's own memory: a step of theirs is seen by the program.
    torch.optim.SGD(runner.parameters(), lr=LR).step()
    before, after = parts(dict(eager.named_parameters())), parts(dict(model.named_parameters()))
    for name, grad in grads.items():
        torch.testing.assert_close(after[name], before[name] - LR * grad, **close)
    runner.close()


def pairs_agree(cases: list[tuple[Placement, Placement, str, str]]) -> None:
    for source, target, schedule, overlap in cases:
        first, second = (Pair(meshes_of_two(), source, target) for _ in range(2))
        agree(first, second, schedule, overlap)


def a_reshard() -> None:
    pairs_agree([(P, S1, "1f1b", "off")])  # the others are slow: four processes plan each


def all_reshards() -> None:
    reshards = [(S1, R), (R, R), (R, S1), (P, R), (P, S1), (S0, S1)]
    for schedule, overlap in (("1f1b", "off"), ("zb-h1", "window")):
        pairs_agree([(source, target, schedule, overlap) for source, target in reshards])


def three_meshes() -> None:
    agree(Three(meshes_of_two()), Three(meshes_of_two()), "zb-h1", "window")


def test_eager_and_captured_agree() -> None:
    all_end_well([(4, "tests.capturing.test_mesh_worlds:a_reshard")])


@pytest.mark.slow
def test_eager_and_captured_agree_on_every_reshard() -> None:
    all_end_well(
        [
            (4, "tests.capturing.test_mesh_worlds:all_reshards"),
            (6, "tests.capturing.test_mesh_worlds:three_meshes"),
        ]
    )
