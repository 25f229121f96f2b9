"""Misuse of tensors on meshes: each has a message that names the tensor, its mesh, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import stretto
from tests.tensor.lone import single_rank

R = [Replicate()]
BOTH, ON, OFF = (0, 3), (0,), (3,)
"""Ranks on which a misuse is an error: rank 0 is on `near`, rank 3 on neither mesh."""


@dataclass
class Given:
    """What the misuses use."""

    near: DeviceMesh
    far: DeviceMesh
    turned: DeviceMesh
    x: torch.Tensor
    y: torch.Tensor


X = "float32 (4, 6) [Shard(0)] on mesh [0, 1]"
Y = "float32 (4, 6) [Replicate()] on mesh [2]"
PLAIN = "plain tensor float32 (4,)"
WRITE = "stretto.reshard_all([(x, mesh, placements), ...])"

Misuse = tuple[Callable[[Given], object], tuple[str, ...]]
"""What is done, and key words of the message."""

IN_OPS: dict[str, Misuse] = {
    "two meshes in one op": (lambda g: g.x + g.y, (X, Y, "stretto.reshard(")),
    "two meshes in cat": (lambda g: torch.cat([g.x, g.y]), (X, Y)),
    "two meshes, in place": (lambda g: g.x.add_(g.y), (X, Y)),
    "plain with a gradient": (lambda g: g.x * torch.ones(6, requires_grad=True), (X, "stretto.shard(it,")),
    "plain of a part's shape": (lambda g: g.x + torch.ones(2, 6), (X, "DTensor.from_local(it,")),
    "write into plain": (lambda g: torch.ones(4, 6).add_(g.x), (X, "writes into plain tensor")),
    "nonzero": (lambda g: g.x.nonzero(), (X, "stretto.local(full)")),
    "masked select": (lambda g: torch.masked_select(g.x, g.x > 0), (X, "torch.where")),
    "boolean index": (lambda g: g.x[g.x > 0], (X, "stretto.local(full)")),
    "gathers in the wrong order": (
        lambda g: torch.softmax(stretto.shard(torch.ones(4, 4), g.turned, [Shard(0)]), 0),
        ("mesh [3, 0]", "do not ascend"),
    ),
}
IN_CALLS: dict[str, Misuse] = {
    "reshard of a plain tensor": (lambda g: stretto.reshard(torch.ones(4), g.near, R), (PLAIN,)),
    "local of a plain tensor": (lambda g: stretto.local(torch.ones(4)), ("stretto.shard(",)),
    "local of no tensor": (lambda g: stretto.local(3.0), ("float 3.0",)),
    "too few placements": (
        lambda g: stretto.reshard(g.x, DeviceMesh("cpu", [[0, 1], [2, 3]]), R),
        (X, "of 2 axes", "1 placements"),
    ),
    "no such dim": (lambda g: stretto.reshard(g.x, g.far, [Shard(2)]), (X, "no dim 2", "mesh [2]")),
    "shard of a 0-d tensor": (lambda g: stretto.shard(torch.ones(()), g.near, [Shard(0)]), ("no dim 0",)),
    "no placement": (lambda g: stretto.reshard(g.x, g.far, ["S0"]), (X, "'S0'", "Shard(dim)")),
    "one placement, no list": (lambda g: stretto.reshard(g.x, g.far, Shard(0)), (X, "give a list")),
    "no mesh": (lambda g: stretto.reshard(g.x, [2, 3], R), (X, "[2, 3]", "DeviceMesh")),
    "shard onto no mesh": (lambda g: stretto.shard(torch.ones(4), [2, 3], R), ("[2, 3]", "DeviceMesh")),
    "a product as target": (lambda g: stretto.reshard(g.x, g.far, [Partial("product")]), ("Replicate()",)),
    "shard twice": (lambda g: stretto.shard(g.x, g.far, R), (X, "stretto.reshard(x, mesh,")),
    "shard of a result": (
        lambda g: stretto.shard(torch.ones(4, requires_grad=True) * 2, g.far, R),
        (PLAIN, ".detach()"),
    ),
    "shard of a list": (lambda g: stretto.shard([1.0], g.far, R), ("[1.0]", "torch.as_tensor")),
    "another device type": (
        lambda g: stretto.reshard(g.x, DeviceMesh("meta", [2], _init_backend=False), R),
        (X, "one device type"),
    ),
    "no such mode": (lambda g: stretto.reshard(g.x, g.far, R, mode="slow"), (X, "'slow'", "point_to_point")),
    "no bytes": (lambda g: stretto.reshard(g.x, g.far, R, in_flight_bytes=0), (X, "above 0")),
    "a list for a tensor": (lambda g: stretto.reshard([g.x, g.x], g.far, R), ("one tensor", WRITE)),
    "a list of meshes": (lambda g: stretto.reshard(g.x, [g.far, g.far], R), (X, "one DeviceMesh", WRITE)),
    "a tensor for moves": (lambda g: stretto.reshard_all(g.x), (X, "list of moves", WRITE)),
    "tensors for moves": (lambda g: stretto.reshard_all([g.x, g.x]), ("move 0", X, WRITE)),
    "a move of two": (lambda g: stretto.reshard_all([(g.x, g.far)]), ("move 0", WRITE)),
    "a wrong move": (
        lambda g: stretto.reshard_all([(g.x, g.far, R), (g.x, g.far, [Shard(2)])]),
        ("move 1", X, "no dim 2"),
    ),
}
ON_THE_MESH: dict[str, Misuse] = {
    "no values": (lambda g: stretto.shard(torch.ones(4, device="meta"), g.near, R), ("'meta'", "rank 0")),
}
OFF_THE_MESH: dict[str, Misuse] = {
    "item": (lambda g: g.x.sum().item(), ("rank 3 has no value", "mesh [0, 1]", "stretto.local(x)")),
    "if": (lambda g: bool((g.x > 0).all()), ("rank 3 has no value", "stretto.reshard(x")),
    "to_local": (lambda g: g.x.to_local(), ("rank 3 has no part", X, "use_local_output=False")),
    "full_tensor": (lambda g: g.x.full_tensor(), ("rank 3 has no part", X)),
}
MISUSES = [
    pytest.param(ranks, *misuse, id=name)
    for ranks, table in ((BOTH, IN_OPS), (BOTH, IN_CALLS), (ON, ON_THE_MESH), (OFF, OFF_THE_MESH))
    for name, misuse in table.items()
]


@pytest.mark.parametrize(("ranks", "misuse", "words"), MISUSES)
def test_misuse(ranks: tuple[int, ...], misuse: Callable[[Given], object], words: tuple[str, ...]) -> None:
    for rank in ranks:
        with single_rank(rank, 4):
            near, far = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
            x = stretto.shard(torch.randn(4, 6), near, [Shard(0)])
            y = stretto.shard(torch.randn(4, 6), far, [Replicate()])
            with pytest.raises(stretto.UsageError) as caught:
                misuse(Given(near, far, DeviceMesh("cpu", [3, 0]), x, y))
            assert all(word in str(caught.value) for word in words), caught.value


def test_a_plain_tensor_of_a_parts_shape_that_is_the_whole_is_taken() -> None:
    with single_rank(0, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        x = stretto.shard(torch.ones(4, 6), mesh, [Replicate()])
        found = stretto.local(x + torch.ones(4, 6))
        assert found is not None
        assert torch.equal(found, torch.full((4, 6), 2.0))
