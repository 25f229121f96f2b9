"""Models written once, on several meshes: they train to the numbers of the plain program, on every rank.

One launch runs all cases of one number of ranks, so that processes start once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import stretto
from stretto.runtime.memory_adapter import MemoryMeter
from stretto.tensor.clip import nothing
from stretto.tensor.dtensor_adapter import local_of
from tests.tensor.lone import Kernels
from tests.tensor.world import all_end_well

F64 = torch.float64
STEPS = 4
Optimizer = Callable[..., torch.optim.Optimizer]


def ranged(*shape: int) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return torch.sin(torch.arange(count, dtype=F64)).reshape(shape) / 2


class PartsMeter(MemoryMeter):
    """Counts what is in tensors on meshes, not these themselves."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class MLP(nn.Module):
    """Two linear layers, each without bias; `at_border` is what is between the stages."""

    def __init__(self, at_border: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12, bias=False, dtype=F64)
        self.second = nn.Linear(12, 6, bias=False, dtype=F64)
        self.first.weight.data = ranged(12, 8)
        self.second.weight.data = ranged(6, 12)
        self.at_border = at_border

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.at_border(torch.relu(self.first(x))))


def losses(
    model: MLP, x: torch.Tensor, y: torch.Tensor, optimizer: Optimizer, value: Callable[[torch.Tensor], float]
) -> list[float]:
    steps = optimizer(model.parameters(), lr=0.05)
    found = []
    for _ in range(STEPS):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        steps.step()
        steps.zero_grad()
        found.append(value(loss.detach()))
    return found


def check_mlp(first: DeviceMesh, second: DeviceMesh, optimizer: Optimizer) -> None:
    expected = losses(MLP(lambda h: h), ranged(10, 8), ranged(10, 6), optimizer, lambda v: v.item())
    everywhere = DeviceMesh("cpu", list(range(dist.get_world_size())))
    full = [Replicate()]

    def border(h: torch.Tensor) -> torch.Tensor:
        return stretto.reshard(h, second, [Shard(1)])

    def value(loss: torch.Tensor) -> float:
        part = stretto.local(stretto.reshard(loss, everywhere, full))
        assert part is not None
        return part.item()

    model = MLP(border)
    stretto.shard(model.first, first, [Shard(0)])
    stretto.shard(model.second, second, [Shard(1)])
    x, y = stretto.shard(ranged(10, 8), first, full), stretto.shard(ranged(10, 6), second, full)
    found = losses(model, x, y, optimizer, value)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert found[-1] < found[0]


def four_ranks() -> None:
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        check_mlp(first, second, optimizer)
    check_mlp(DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [2, 3]), torch.optim.SGD)
    gradients()
    checkpoint()
    microbatches_run_ahead(first, second)


def gradients() -> None:
    """Of chains of reshards, sums among them, against the plain program."""
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2, 3])
    square = DeviceMesh("cpu", [[0, 1], [2, 3]])
    ways: Sequence[Any] = (
        [(b, [Shard(0)])],
        [(b, [Shard(1)]), (a, [Replicate()])],
        [(a, [Partial()]), (b, [Replicate()])],
        [(square, [Partial(), Shard(1)]), (a, [Shard(1)])],
        [(square, [Shard(0), Shard(0)]), (square, [Replicate(), Shard(1)]), (b, [Partial()])],
        [(a, [Shard(1)]), (a, [Replicate()])],
    )
    plain = ranged(5, 4).requires_grad_()
    (plain**2).mul(ranged(5, 4)).sum().backward()
    assert plain.grad is not None
    for way in ways:
        x = stretto.shard(ranged(5, 4).requires_grad_(), a, [Shard(0)])
        moved = x * x
        for mesh, placements in way:
            moved = stretto.reshard(moved, mesh, placements)
        mesh = moved.device_mesh
        weights = stretto.shard(ranged(5, 4), mesh, [Replicate()] * mesh.ndim)
        (moved * weights).sum().backward()
        assert isinstance(x.grad, DTensor)
        found = stretto.local(stretto.reshard(x.grad, a, [Replicate()]))
        assert found is None or torch.allclose(found, plain.grad, rtol=1e-12, atol=1e-12), f"{way}: {found}"


def checkpoint() -> None:
    """PyTorch's own: saved from two meshes, loaded into others."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3], [1, 2, 3], [0])]
    kinds = [[Shard(0)], [Shard(1)], [Shard(1)], [Replicate()]]
    values = [ranged(6, 4), ranged(5, 3)]

    def state(full_values: list[torch.Tensor], at: int) -> dict[str, Any]:
        places = zip(("first", "second"), full_values, meshes[at:], kinds[at:])
        return {name: stretto.shard(full, mesh, kind) for name, full, mesh, kind in places}

    dcp.save(state(values, 0), checkpoint_id=folder[0])
    loaded = state([torch.zeros_like(value) for value in values], 2)
    dcp.load(loaded, checkpoint_id=folder[0])
    for found, value in zip(loaded.values(), values):
        mesh = found.device_mesh
        part = stretto.local(stretto.reshard(found, mesh, [Replicate()]))
        assert part is None or torch.equal(part, value)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def microbatches_run_ahead(first: DeviceMesh, second: DeviceMesh) -> None:
    """All forwards, then all backwards: sends wait on the narrow limit, and nothing locks."""
    w = stretto.shard(nn.Parameter(ranged(8, 8)), first, [Replicate()])
    v = stretto.shard(nn.Parameter(ranged(8, 8)), second, [Replicate()])
    kept = []
    for at in range(6):
        x = stretto.shard(ranged(4, 8) + at, first, [Shard(0)])
        kept.append((stretto.reshard(x @ w, second, [Shard(0)], in_flight_bytes=64) @ v).sum())
    for loss in kept:
        loss.backward()
    pw, pv = ranged(8, 8).requires_grad_(), ranged(8, 8).requires_grad_()
    sum((((ranged(4, 8) + at) @ pw @ pv).sum() for at in range(6)), torch.zeros(())).backward()
    for found, plain in ((w, pw), (v, pv)):
        assert isinstance(found.grad, DTensor)
        part = stretto.local(stretto.reshard(found.grad, found.device_mesh, [Replicate()]))
        assert part is None or torch.allclose(part, plain.grad, rtol=1e-12)


def three_meshes() -> None:
    """Three stages, a skip edge from the first to the last, and one from the input to the second."""
    rank = dist.get_rank()
    meshes = [DeviceMesh("cpu", [stage]) for stage in range(3)]
    size = 256
    stage_bytes = size * size * 8
    full = [Replicate()]
    for dtype in (F64, torch.bool):
        nothing(dtype, "cpu")

    def program(
        w: list[Any], move: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        h0 = torch.relu(x @ w[0])
        h1 = torch.relu(move(h0, 1) @ w[1]) + move(x, 1)
        return ((move(h1, 2) @ w[2] + move(h0, 2)) ** 2).mean()

    plain = [ranged(size, size).requires_grad_() for _ in range(3)]
    expected = program(plain, lambda h, _: h, ranged(4, size))
    expected.backward()
    expected_grad = plain[rank].grad
    assert expected_grad is not None
    expected_value = expected.item()
    del plain, expected

    # The first pass learns what the second needs: descriptions of meshes, groups.
    for _ in range(2):
        w = [stretto.shard(ranged(size, size).requires_grad_(), mesh, full) for mesh in meshes]
        x = stretto.shard(ranged(4, size), meshes[0], full)
        with PartsMeter([local_of(v) for v in w]) as meter, Kernels() as kernels:
            loss = program(w, lambda h, stage: stretto.reshard(h, meshes[stage], full), x)
            loss.backward()
    # Its own weight and gradient, and messages and activations of a few rows.
    assert 2 * stage_bytes <= meter.peak_bytes < 2.4 * stage_bytes, meter.peak_bytes
    products = [op for op in kernels.ran if "mm" in op]
    assert len(products) == (2 if rank == 0 else 3), products  # x of the first stage wants no gradient
    resident = [local_of(v).untyped_storage().nbytes() for v in w]
    assert resident == [stage_bytes if stage == rank else 0 for stage in range(3)]
    found = w[rank].grad
    assert isinstance(found, DTensor)
    assert torch.allclose(local_of(found), expected_grad, rtol=1e-10, atol=1e-14)
    value = stretto.local(loss)
    assert (value is None) == (rank != 2)
    assert value is None or abs(value.item() - expected_value) < 1e-10
    grads = [local_of(v.grad).untyped_storage().nbytes() for v in w if isinstance(v.grad, DTensor)]
    assert grads == resident


def narrow_memory() -> None:
    """What a rank allocates in a reshard is its own parts, and pieces: not the full tensor."""
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    rows = 4096
    full_bytes = rows * 256 * 8
    limit = 1 << 18
    x = stretto.shard(torch.ones(rows, 256, dtype=F64), a, [Shard(0)])
    stretto.reshard(x, b, [Shard(1)], in_flight_bytes=limit)
    dist.barrier()
    with torch.profiler.profile(profile_memory=True) as profiled:
        y = stretto.reshard(x, b, [Shard(1)], in_flight_bytes=limit)
        dist.barrier()
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    mine = local_of(y).untyped_storage().nbytes()
    assert mine in (0, full_bytes // 2)
    # Pieces on their way in or out, and what the profiler itself takes.
    assert peak <= mine + 3 * limit, (peak, mine)


def four_ranks_memory() -> None:
    narrow_memory()
    four_ranks()


def test_programs() -> None:
    programs = ((3, three_meshes), (4, four_ranks_memory))
    all_end_well([(ranks, f"tests.tensor.test_face:{program.__name__}") for ranks, program in programs])


def test_shard_cuts_as_dtensor_does_and_keeps_parameters_tied() -> None:
    from tests.tensor.lone import single_rank

    with single_rank(1, 4):
        mesh = DeviceMesh("cpu", [0, 1, 2])
        part = stretto.local(stretto.shard(ranged(7, 4), mesh, [Shard(0)]))
        assert part is not None
        assert torch.equal(part, ranged(7, 4)[3:6])
        assert part.untyped_storage().nbytes() == 3 * 4 * 8
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
        assert stretto.shard(model, mesh) is model
        assert model[1].weight is model[0].weight
        assert isinstance(model[0].weight, nn.Parameter)
        assert all(isinstance(v, stretto.GlobalTensor) for v in (*model.parameters(), *model.buffers()))
    with single_rank(3, 4):
        mesh = DeviceMesh("cpu", [0, 1, 2])
        x = stretto.shard(torch.empty(7, 4, device="meta"), mesh, [Shard(0)])
        assert (tuple(x.shape), x.device.type, stretto.local(x)) == ((7, 4), "cpu", None)
