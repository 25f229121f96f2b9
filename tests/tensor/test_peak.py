"""The most that a rank ever holds is its own stage's: weights, optimizer, activations, gradients, messages.

A model on three meshes, with a skip over the middle one and stages of very different sizes, trains on four
ranks, one of them off all meshes. Each rank counts the bytes of live storages, op by op, and then runs its
stage alone, in plain PyTorch, where a message is a copy that goes, or a buffer that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import stretto
from stretto.runtime.memory_adapter import MemoryMeter
from stretto.tensor.dtensor_adapter import local_of
from stretto.tensor.reshard import lines
from tests.tensor.world import all_end_well

ROWS = 40
WIDTHS = {"first": (16, 256), "up": (256, 1024), "down": (1024, 64), "skip": (256, 64), "last": (64, 8)}
"""Of each weight. Stages: first; up and down; skip and last."""

STAGES = {"first": 0, "up": 1, "down": 1, "skip": 2, "last": 2}
STEPS = 2
STEP_COUNT_BYTES = 4
"""AdamW counts the steps of each parameter in a plain number, on every rank."""

NUMBERS_BYTES = 8
"""Two plain numbers: what starts a backward pass, or comes and goes in a step of the optimizer."""

Tensors = dict[str, torch.Tensor]


class Meter(MemoryMeter):
    """Sees what lies in tensors on meshes, not these themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # go on to the tensor; what it runs comes here again
        return super().__torch_dispatch__(func, types, args, kwargs)


def ranged(*shape: int) -> torch.Tensor:
    return torch.sin(torch.arange(torch.Size(shape).numel())).reshape(shape) / 4


def weights() -> Tensors:
    return {name: ranged(*shape) for name, shape in WIDTHS.items()}


def train(w: Iterable[torch.Tensor], held: Iterable[torch.Tensor], loss: Callable[[], torch.Tensor]) -> int:
    """Some steps. Returns the peak, in bytes, with what is held throughout."""
    with Meter(held) as meter:
        steps = torch.optim.AdamW(w, lr=0.01)
        for _ in range(STEPS):
            loss().backward()
            steps.step()
            steps.zero_grad()
    return meter.peak_bytes


def on_meshes() -> int:
    rank, whole = dist.get_rank(), [Replicate()]
    meshes = [DeviceMesh("cpu", [at]) for at in range(3)]
    w = {
        name: stretto.shard(torch.nn.Parameter(x), meshes[STAGES[name]], whole)
        for name, x in weights().items()
    }
    x = stretto.shard(ranged(ROWS, WIDTHS["first"][0]), meshes[0], whole)
    y = stretto.shard(ranged(ROWS, WIDTHS["last"][1]), meshes[2], whole)

    def loss() -> torch.Tensor:
        h = torch.relu(x @ w["first"])
        skip = stretto.reshard(h, meshes[2], whole)
        g = torch.tanh(stretto.reshard(h, meshes[1], whole) @ w["up"]) @ w["down"]
        z = stretto.reshard(g, meshes[2], whole) + skip @ w["skip"]
        return F.mse_loss(torch.tanh(z) @ w["last"], y)

    held = [local_of(t) for t in (*w.values(), x, y) if t.device_mesh.get_coordinate() is not None]
    assert rank < 3 or not held
    return train(w.values(), held, loss)


class Sent(torch.autograd.Function):
    """A message goes, as a copy, and its gradient comes. Gives an empty tensor, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        x.clone()
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty(ctx.shape).fill_(0.5)


class Received(torch.autograd.Function):
    """A message comes, and its gradient goes, as a copy."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *shape: int) -> torch.Tensor:
        ctx.count = len(shape)
        return torch.empty(shape).fill_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient.clone()
        return (torch.empty(0), *[None] * ctx.count)


def alone(stage: int) -> int:
    """The stage in plain PyTorch."""
    w = {name: torch.nn.Parameter(x) for name, x in weights().items() if STAGES[name] == stage}
    x, y = ranged(ROWS, WIDTHS["first"][0]), ranged(ROWS, WIDTHS["last"][1])
    root = torch.empty(0, requires_grad=True)

    def first() -> torch.Tensor:
        h = torch.relu(x @ w["first"])
        skip = Sent.apply(h)
        return (Sent.apply(h) + skip).sum()

    def middle() -> torch.Tensor:
        g = torch.tanh(Received.apply(root, ROWS, 256) @ w["up"]) @ w["down"]
        return Sent.apply(g).sum()

    def last() -> torch.Tensor:
        skip = Received.apply(root, ROWS, 256)
        z = Received.apply(root, ROWS, 64) + skip @ w["skip"]
        return F.mse_loss(torch.tanh(z) @ w["last"], y)

    held = [*w.values(), *[x] * (stage == 0), *[y] * (stage == 2)]
    return train(w.values(), held, [first, middle, last][stage])


def four_ranks() -> None:
    send = lines.PeerLinks.send

    def send_and_wait(self: lines.PeerLinks, *args: Any) -> None:
        send(self, *args)
        self.drain()  # how long a copy lives would else depend on how busy the receiver is

    lines.PeerLinks.send = send_and_wait  # type: ignore[method-assign]
    rank = dist.get_rank()
    found = on_meshes()
    foreign = sum(STEP_COUNT_BYTES for stage in STAGES.values() if stage != rank)
    expected = (alone(rank) if rank < 3 else 0) + foreign
    assert abs(found - expected) <= NUMBERS_BYTES, f"rank {rank}: {found} bytes, alone {expected}"
    assert rank != 3 or found < 100
    dist.barrier()


def test_the_peak_of_a_rank_is_that_of_its_stage_alone() -> None:
    all_end_well([(4, "tests.tensor.test_peak:four_ranks")])
