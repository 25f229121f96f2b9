"""Clip: a rank off the mesh sees what ranks on the mesh see, runs no kernel and has no byte.

Each program runs twice, as a rank of the mesh and as one off it; descriptions must be equal throughout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import stretto
from stretto.tensor.clip import nothing
from stretto.tensor.dtensor_adapter import local_of
from stretto.tensor.global_tensor import GlobalTensor
from tests.tensor.lone import Kernels, single_rank

Tensors = dict[str, torch.Tensor]


def attention(t: Tensors) -> torch.Tensor:
    q = (t["x"] @ t["w"]).view(2, 4, 2, 4).transpose(1, 2)
    return (torch.softmax(q @ q.transpose(-1, -2), -1) @ q).transpose(1, 2).reshape(8, 8)


def in_place(t: Tensors) -> torch.Tensor:
    y = t["x"] * 2
    y.add_(t["x"]).mul_(0.5).relu_()
    return y


def through_meshes(t: Tensors) -> torch.Tensor:
    y = stretto.reshard(t["x"] @ t["w"], t["far"].device_mesh, [Replicate()])
    return stretto.reshard(torch.relu(y), t["x"].device_mesh, [Shard(0)]) + t["x"]


PROGRAMS: dict[str, Callable[[Tensors], Any]] = {
    "linear": lambda t: F.linear(t["x"], t["w"], t["b"]),
    "cross entropy": lambda t: F.cross_entropy(t["x"], t["labels"]),
    "sum to 0-d": lambda t: t["x"].sum(),
    "attention": attention,
    "in place": in_place,
    "to another mesh and back": through_meshes,
    "new of its kind": lambda t: torch.zeros_like(t["x"]) + t["x"].new_ones(8, 8) + t["x"],
    "integers as indices": lambda t: t["w"].index_select(0, t["labels"]) + t["x"],
    "a plain tensor beside it": lambda t: t["x"] * t["plain"] + 1,
    "convolution": lambda t: F.conv2d(t["image"], t["kernel"]),
}


def tensors(near: DeviceMesh, far: DeviceMesh) -> Tensors:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, requires_grad=True)

    return {
        "x": stretto.shard(leaf(8, 8), near, [Shard(0)]),
        "w": stretto.shard(leaf(8, 8), near, [Replicate()]),
        "b": stretto.shard(leaf(8), near, [Replicate()]),
        "labels": stretto.shard(torch.arange(8) % 8, near, [Shard(0)]),
        "image": stretto.shard(leaf(4, 3, 6, 6), near, [Shard(0)]),
        "kernel": stretto.shard(leaf(5, 3, 3, 3), near, [Replicate()]),
        "plain": torch.arange(8.0),
        "far": stretto.shard(torch.zeros(1), far, [Replicate()]),
    }


def description(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    assert isinstance(x, GlobalTensor)
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        x.layout,
        x.requires_grad,
        x.placements,
        x.device_mesh.mesh.tolist(),
    )


def run(program: Callable[[Tensors], Any], rank: int) -> tuple[list[Any], list[Any], Kernels]:
    """Descriptions of the result and of all gradients, the tensors themselves, and what ran."""
    with single_rank(rank, 6):
        for dtype in (torch.bool, torch.bfloat16):
            nothing(dtype, "cpu")  # made once in a process
        near, far = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])
        given = tensors(near, far)
        with Kernels() as kernels:
            y = program(given)
            if y.requires_grad:
                y.float().sum().backward()
        found = [y, *(x.grad for x in given.values())]
        return [description(x) for x in found], found, kernels


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rank_off_the_mesh_sees_the_same_and_does_nothing(name: str) -> None:
    on, _, _ = run(PROGRAMS[name], rank=0)
    off, found, kernels = run(PROGRAMS[name], rank=5)
    assert off == on
    assert kernels.seen > 0
    assert kernels.ran == []
    kept = [local_of(x).untyped_storage().nbytes() for x in found if isinstance(x, DTensor)]
    assert kept == [0] * len(kept)


def train(rank: int, optimizer: Callable[..., torch.optim.Optimizer]) -> tuple[list[Any], int, Kernels]:
    with single_rank(rank, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        w = stretto.shard(torch.nn.Parameter(torch.randn(8, 8)), mesh, [Shard(0)])
        x = stretto.shard(torch.randn(4, 8), mesh, [Replicate()])
        steps = optimizer([w], lr=0.1)
        with Kernels() as kernels:
            for _ in range(2):
                (x @ w.t()).pow(2).mean().backward()
                steps.step()
                steps.zero_grad()
        state = [v for v in steps.state[w].values() if isinstance(v, DTensor)]
        kept = sum(local_of(v).untyped_storage().nbytes() for v in [w, *state])
        return [description(v) for v in [w, *state]], kept, kernels


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}, None], ids=str)
def test_optimizers_step_without_work_off_the_mesh(how: dict[str, bool] | None) -> None:
    optimizer = torch.optim.SGD if how is None else partial(torch.optim.AdamW, **how)
    on, _, _ = train(0, optimizer)
    off, kept, kernels = train(3, optimizer)
    assert off == on
    assert kept == 0
    # AdamW counts its steps in a plain 0-d tensor, on every rank.
    assert [op for op in kernels.ran if "mm" in op or "addcdiv" in op or "lerp" in op] == []


def test_module_styles_and_foreign_tensors_join() -> None:
    """Tensor-parallel modules as PyTorch makes them, on and off the mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    found = []
    for rank in (0, 3):
        with single_rank(rank, 4):
            mesh = DeviceMesh("cpu", [0, 1])
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
            plan = {
                "0": ColwiseParallel(use_local_output=False),
                "2": RowwiseParallel(use_local_output=False),
            }
            parallelize_module(model, mesh, plan)
            x = stretto.shard(torch.randn(4, 8, requires_grad=True), mesh, [Replicate()])
            y = model(x)
            y.pow(2).mean().backward()
            grads = [p.grad for p in model.parameters()]
            found.append([description(y), description(x.grad), *((g.shape, g.placements) for g in grads)])
    assert found[0] == found[1]


def test_redistribute_to_another_mesh_moves_and_pytorchs_own_does_not() -> None:
    """PyTorch's own leaves its tensor where it was, without a word: the day it does, this goes."""
    with single_rank(0, 4), contextlib.suppress(NotImplementedError):
        near, far = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        bare = DTensor.from_local(torch.ones(2, 4), near, [Shard(0)])
        assert tuple(local_of(bare.redistribute(far, [Shard(0)])).shape) == (2, 4)
        moved = stretto.shard(torch.ones(4, 4), near, [Shard(0)]).redistribute(far, [Shard(0)])
        assert moved.device_mesh == far
        assert stretto.local(moved) is None
