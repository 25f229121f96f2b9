"""A program on several meshes, run eagerly and captured into a plan: the same numbers, on the same ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import stretto
from stretto.capturing.captures import Captures
from stretto.ir.action import Phase
from stretto.runtime.transport import ThreadTransport
from tests.tensor.lone import lone_rank
from tests.tensor.world import all_end_well

F64 = torch.float64
MICROBATCHES = 4
ROWS = 8


class Skip(nn.Module):
    """Three layers on three meshes; what the first makes is used by the second and the third."""

    def __init__(self, meshes: list[DeviceMesh], early: bool = False, back: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=F64) for _ in meshes)
        for layer, mesh in zip(self.layers, meshes, strict=True):
            stretto.shard(layer, mesh)
        self.meshes = meshes
        self.early = early
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.layers[0](x))
        if self.early:
            skipped = self.to(2, first)
        second = torch.tanh(self.layers[1](self.to(1, first)))
        if not self.early:
            skipped = self.to(2, first)
        third = self.layers[2](self.to(2, second) + skipped)
        return self.layers[0](self.to(0, third)) if self.back else third

    def to(self, place: int, x: torch.Tensor) -> torch.Tensor:
        return stretto.reshard(x, self.meshes[place], [Replicate()])


class Sine(nn.Module):
    """Two layers on two meshes; the second uses what the first mesh makes of its buffer."""

    table: torch.Tensor

    def __init__(self, meshes: list[DeviceMesh]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.linspace(-1.0, 1.0, 6, dtype=F64))
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=F64) for _ in meshes)
        for layer, mesh in zip(self.layers, meshes, strict=True):
            stretto.shard(layer, mesh)
        self.table = stretto.shard(self.table, meshes[0])
        self.meshes = meshes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, sine = torch.tanh(self.layers[0](x)), torch.sin(self.table)
        first, sine = stretto.reshard_all([(t, self.meshes[1], [Replicate()]) for t in (first, sine)])
        out: torch.Tensor = self.layers[1](first * sine)
        return out


def one_rank_each() -> list[DeviceMesh]:
    return [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())]


def batch() -> dict[str, torch.Tensor]:
    made = torch.sin(torch.arange(2 * ROWS * 6, dtype=F64)).reshape(2, ROWS, 6)
    return {"x": made[0], "y": made[1]}


def loss_of(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(given["x"]), given["y"])


def parallel(**changed: Any) -> stretto.Parallel:
    return stretto.Parallel(**({"pp": 3, "microbatches": MICROBATCHES, "schedule": "1f1b"} | changed))


def eager_and_captured_agree() -> None:
    meshes = one_rank_each()
    given = batch()
    eager = Skip(meshes)
    on_mesh = {"x": stretto.shard(given["x"], meshes[0]), "y": stretto.shard(given["y"], meshes[2])}
    loss = loss_of(eager, on_mesh)
    loss.backward()
    everywhere = DeviceMesh("cpu", [0, 1, 2])
    expected = stretto.local(stretto.reshard(loss.detach(), everywhere, [Replicate()]))
    assert expected is not None
    expected_grads = {
        name: part
        for name, parameter in eager.named_parameters()
        if parameter.grad is not None and (part := stretto.local(parameter.grad)) is not None
    }
    assert len(expected_grads) == 2, "a weight and a bias on each rank"

    model = Skip(meshes)
    job = stretto.capture(model, given, loss_of, parallel())
    assert [p.stages for p in job.parameters] == [(k // 2,) for k in range(6)]
    edges = {(e.source, e.target) for e in job.edges}
    assert {(0, 1), (0, 2), (1, 2)} <= edges, edges
    plan = stretto.plan(job, cluster=stretto.Cluster())
    stretto.verify(plan)
    runner = stretto.Runner(plan, model)
    for _ in range(2):
        torch.testing.assert_close(runner.step(given), expected.reshape(()), rtol=1e-10, atol=1e-10)
        found = {name: parameter.grad for name, parameter in runner.named_parameters()}
        assert found.keys() == expected_grads.keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-10, atol=1e-10)
        for parameter in runner.parameters():
            parameter.grad = None

    # The runner's parameters are the model's own memory: a step of theirs is seen by the program.
    optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
    runner.step(given)
    optimizer.step()
    after = {name: stretto.local(p.detach()) for name, p in model.named_parameters()}
    before = {name: stretto.local(p.detach()) for name, p in eager.named_parameters()}
    for name, grad in expected_grads.items():
        torch.testing.assert_close(after[name], before[name] - 0.1 * grad, rtol=1e-10, atol=1e-10)
    runner.close()


def what_a_buffer_gives_is_made_where_it_lies() -> None:
    meshes = one_rank_each()
    given = batch()
    eager = Sine(meshes)
    loss = loss_of(
        eager, {"x": stretto.shard(given["x"], meshes[0]), "y": stretto.shard(given["y"], meshes[1])}
    )
    loss.backward()
    everywhere = DeviceMesh("cpu", [0, 1])
    expected = stretto.local(stretto.reshard(loss.detach(), everywhere, [Replicate()]))

    model = Sine(meshes)
    job = stretto.capture(model, given, loss_of, parallel(pp=2))
    (sine,) = [op for op in job.stages[0].ops[Phase.F] if op.target == "aten.sin.default"]
    assert [(b.name, b.stages) for b in job.buffers] == [("table", (0,))]
    assert sine.name in [edge.value for edge in job.edges if (edge.source, edge.target) == (0, 1)]
    plan = stretto.plan(job, cluster=stretto.Cluster())
    runner = stretto.Runner(plan, model)
    assert expected is not None
    torch.testing.assert_close(runner.step(given), expected.reshape(()), rtol=1e-10, atol=1e-10)
    runner.close()


def masked(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the elements that count, of which microbatches have unequal numbers."""
    kept = given["y"] > 0.3
    mesh = model.meshes[-1]
    off = (model(given["x"]) - stretto.shard(given["y"], mesh)) * stretto.shard(kept.to(F64), mesh)
    return off.square().sum(), kept.sum()


def a_sum_with_its_count_is_captured() -> None:
    meshes = one_rank_each()
    given = batch()
    eager = Skip(meshes)
    total, count = masked(eager, given)
    loss = total / float(count)
    loss.backward()
    expected = {n: part for n, p in eager.named_parameters() if (part := stretto.local(p.grad)) is not None}
    model = Skip(meshes)
    plan = stretto.plan(stretto.capture(model, given, masked, parallel()), cluster=stretto.Cluster())
    runner = stretto.Runner(plan, model)
    runner.step(given)
    for name, parameter in runner.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-10)
    runner.close()


def test_a_count_of_what_ranks_have_parts_of_is_refused() -> None:
    with lone_rank(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        model = nn.Linear(6, 6, dtype=F64)
        stretto.shard(model, mesh)

        def loss(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = (stretto.shard(given[key], mesh, [Shard(0)]) for key in ("x", "y"))
            return model(x).square().sum(), y.square().sum()

        with pytest.raises(
            stretto.CaptureError, match=r"is not made from the microbatch alone: .* plain tensors"
        ):
            stretto.capture(model, batch(), loss, stretto.Parallel(pp=1, tp=2, microbatches=2))


def test_a_program_on_meshes_becomes_a_plan() -> None:
    all_end_well(
        [
            (3, "tests.capturing.test_meshes:eager_and_captured_agree"),
            (2, "tests.capturing.test_meshes:what_a_buffer_gives_is_made_where_it_lies"),
            (3, "tests.capturing.test_meshes:a_sum_with_its_count_is_captured"),
        ]
    )


def test_meshes_are_the_stages_where_planning_may_choose_their_number() -> None:
    with lone_rank(1, 3):
        model = Skip(one_rank_each())
        model.more = nn.ModuleList(copy.deepcopy(model.layers[0]) for _ in range(6))
        chosen = parallel(schedule="auto", virtual_stages="auto")
        assert Captures(model, batch(), loss_of).stages(chosen) == (3,)


def test_misuse_is_refused() -> None:
    with lone_rank(1, 3):
        refuse_misuse()


def refuse_misuse() -> None:
    meshes = one_rank_each()

    def refused(make: Callable[[], nn.Module], message: str, **changed: Any) -> None:
        with pytest.raises(stretto.UsageError, match=message):
            stretto.capture(make(), batch(), loss_of, parallel(**changed))

    def half_plain() -> nn.Module:
        model = Skip(meshes)
        model.layers[1] = nn.Linear(6, 6, dtype=F64)
        return model

    def stays() -> nn.Module:
        model = Skip(meshes)
        model.to = lambda place, x: x  # type: ignore[method-assign]
        return model

    pair, two = DeviceMesh("cpu", [0, 1]), [meshes[0], meshes[2], meshes[0]]
    refused(
        lambda: Skip([meshes[0], pair, meshes[2]]),
        r"'layers.0.weight' is on a mesh of 1 ranks, \[0\], and 'layers.1.weight' on one of 2, \[0, 1\]",
    )
    refused(lambda: Skip(two), r"meshes of ranks \[0\], \[2\]; its 2 stages are at ranks \[0\], \[1\]", pp=2)
    refused(
        lambda: Skip(meshes[::-1]),
        "never reshards a tensor to the mesh of rank 2.*on the mesh of rank 0",
    )
    refused(lambda: Skip(meshes, early=True), r"reaches the meshes of ranks \[2\], \[1\] in this order")
    refused(lambda: Skip(meshes, back=True), "uses it after it has gone on to the mesh of rank 2.*never back")
    refused(
        lambda: Skip(meshes),
        r"on 3 meshes of 1 rank, which are its stages: give Parallel\(pp=3, tp=1\)",
        pp=2,
    )
    refused(lambda: Skip(meshes), "with dp=1 and no split", split=["layers.1", "layers.2"])
    refused(half_plain, "'layers.1.weight' is on no mesh")
    with pytest.raises(stretto.CaptureError, match=r"its tensors are on two meshes.*mesh \[1\].*mesh \[0\]"):
        stretto.capture(stays(), batch(), loss_of, parallel())

    # A plan whose stages are elsewhere than the model's tensors.
    plan = stretto.plan(
        stretto.capture(Skip(meshes), batch(), loss_of, parallel()), cluster=stretto.Cluster()
    )
    moved = Skip([meshes[1], meshes[2], meshes[0]])
    with pytest.raises(stretto.UsageError, match=r"has 'layers.1.weight' on rank 1, but it is on mesh \[2\]"):
        stretto.Runner(plan, moved, transport=ThreadTransport.group(3)[1])
