"""Misuse of tensors on meshes: each has a message that names the tensor, its mesh, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

import stretto
from tests.tensor.lone import lone_rank

R = [Replicate()]
BOTH, ON, OFF = (0, 3), (0,), (3,)


@dataclass
class Given:
    """What the misuses use. Rank 0 is on `near`; rank 3 is on none of the first two."""

    near: DeviceMesh
    far: DeviceMesh
    turned: DeviceMesh
    x: torch.Tensor
    y: torch.Tensor


Misuse = tuple[Callable[[Given], object], tuple[int, ...], tuple[str, ...]]
"""What is done, on which ranks it is an error, and what the message says."""

X = "float32 (4, 6) [Shard(0)] on mesh [0, 1]"
Y = "float32 (4, 6) [Replicate()] on mesh [2]"
WRITE = "stretto.reshard_all([(x, mesh, placements), ...])"

MISUSES: dict[str, Misuse] = {
    "two meshes in one op": (lambda g: g.x + g.y, BOTH, (X, Y, "stretto.reshard(")),
    "two meshes in one matmul": (
        lambda g: g.y @ g.x.t(),
        BOTH,
        ("mesh [2]", "mesh [0, 1]", "stretto.reshard("),
    ),
    "two meshes in cat": (lambda g: torch.cat([g.x, g.y]), BOTH, (X, Y, "stretto.reshard(")),
    "two meshes, in place": (lambda g: g.x.add_(g.y), BOTH, (X, Y, "stretto.reshard(")),
    "plain that wants a gradient": (
        lambda g: g.x * torch.ones(6, requires_grad=True),
        BOTH,
        (X, "plain tensor float32 (6,)", "stretto.shard(it, mesh, [Replicate()])"),
    ),
    "plain of a part's shape": (
        lambda g: g.x + torch.ones(2, 6),
        BOTH,
        (X, "plain tensor float32 (2, 6)", "DTensor.from_local(it, mesh, [Shard(0)])"),
    ),
    "write into plain": (lambda g: torch.ones(4, 6).add_(g.x), BOTH, (X, "writes into plain tensor")),
    "nonzero": (lambda g: g.x.nonzero(), BOTH, (X, "stretto.local(full)")),
    "masked select": (lambda g: torch.masked_select(g.x, g.x > 0), BOTH, (X, "torch.where")),
    "unique": (lambda g: torch.unique(g.x), BOTH, (X, "stretto.local(full)")),
    "boolean index": (lambda g: g.x[g.x > 0], BOTH, (X, "stretto.local(full)")),
    "item off the mesh": (
        lambda g: g.x.sum().item(),
        OFF,
        ("rank 3 has no value", "mesh [0, 1]", "stretto.local(x)"),
    ),
    "if off the mesh": (lambda g: bool((g.x > 0).all()), OFF, ("rank 3 has no value", "stretto.reshard(x")),
    "to_local off the mesh": (
        lambda g: g.x.to_local(),
        OFF,
        ("rank 3 has no part", X, "use_local_output=False"),
    ),
    "full_tensor off the mesh": (lambda g: g.x.full_tensor(), OFF, ("rank 3 has no part", X)),
    "reshard of a plain tensor": (
        lambda g: stretto.reshard(torch.ones(4), g.near, R),
        BOTH,
        ("plain tensor float32 (4,)", "stretto.shard(it, mesh, placements)"),
    ),
    "local of a plain tensor": (
        lambda g: stretto.local(torch.ones(4)),
        BOTH,
        ("plain tensor", "stretto.shard("),
    ),
    "local of no tensor": (lambda g: stretto.local(3.0), BOTH, ("float 3.0", "stretto.shard(")),
    "too few placements": (
        lambda g: stretto.reshard(g.x, DeviceMesh("cpu", [[0, 1], [2, 3]]), R),
        BOTH,
        (X, "has 2 axes", "1 placements"),
    ),
    "a dim that is not there": (
        lambda g: stretto.reshard(g.x, g.far, [Shard(2)]),
        BOTH,
        (X, "no dim 2", "mesh [2]"),
    ),
    "shard of a 0-d tensor": (
        lambda g: stretto.shard(torch.ones(()), g.near, [Shard(0)]),
        BOTH,
        ("no dim 0",),
    ),
    "a placement that is none": (
        lambda g: stretto.reshard(g.x, g.far, ["S0"]),
        BOTH,
        (X, "'S0'", "Shard(dim)"),
    ),
    "one placement, no list": (lambda g: stretto.reshard(g.x, g.far, Shard(0)), BOTH, (X, "give a list")),
    "a mesh that is none": (lambda g: stretto.reshard(g.x, [2, 3], R), BOTH, (X, "[2, 3]", "DeviceMesh")),
    "shard onto no mesh": (lambda g: stretto.shard(torch.ones(4), [2, 3], R), BOTH, ("[2, 3]", "DeviceMesh")),
    "a product as target": (
        lambda g: stretto.reshard(g.x, g.far, [Partial("product")]),
        BOTH,
        ("product", "use Replicate()"),
    ),
    "shard twice": (
        lambda g: stretto.shard(g.x, g.far, R),
        BOTH,
        (X, "stretto.reshard(x, mesh, placements)"),
    ),
    "shard of a result": (
        lambda g: stretto.shard(torch.ones(4, requires_grad=True) * 2, g.far, R),
        BOTH,
        ("plain tensor float32 (4,)", ".detach()"),
    ),
    "shard of a list": (lambda g: stretto.shard([1.0], g.far, R), BOTH, ("[1.0]", "torch.as_tensor")),
    "no values on the mesh": (
        lambda g: stretto.shard(torch.ones(4, device="meta"), g.near, R),
        ON,
        ("'meta'", "rank 0 is on mesh [0, 1]"),
    ),
    "another device type": (
        lambda g: stretto.reshard(g.x, DeviceMesh("meta", [2], _init_backend=False), R),
        BOTH,
        (X, "'meta'", "one device type"),
    ),
    "no such mode": (
        lambda g: stretto.reshard(g.x, g.far, R, mode="slow"),
        BOTH,
        (X, "'slow'", "point_to_point"),
    ),
    "no bytes under way": (lambda g: stretto.reshard(g.x, g.far, R, in_flight_bytes=0), BOTH, (X, "above 0")),
    "a list for a tensor": (
        lambda g: stretto.reshard([g.x, g.x], g.far, R),
        BOTH,
        ("takes one tensor", WRITE),
    ),
    "a list of meshes": (
        lambda g: stretto.reshard(g.x, [g.far, g.far], R),
        BOTH,
        (X, "takes one DeviceMesh, not 2", WRITE),
    ),
    "a tensor for moves": (lambda g: stretto.reshard_all(g.x), BOTH, (X, "is not a list of moves", WRITE)),
    "tensors for moves": (lambda g: stretto.reshard_all([g.x, g.x]), BOTH, ("move 0", X, WRITE)),
    "a move of two": (lambda g: stretto.reshard_all([(g.x, g.far)]), BOTH, ("move 0", WRITE)),
    "a plain tensor's move": (
        lambda g: stretto.reshard_all([(g.x, g.far, R), (torch.ones(4), g.far, R)]),
        BOTH,
        ("move 1", "plain tensor float32 (4,)", "stretto.shard(it, mesh, placements)"),
    ),
    "a move along no dim": (
        lambda g: stretto.reshard_all([(g.x, g.far, R), (g.x, g.far, [Shard(2)])]),
        BOTH,
        ("move 1", X, "no dim 2", "mesh [2]"),
    ),
    "moves in no such mode": (
        lambda g: stretto.reshard_all([(g.x, g.far, R)], mode="ring"),
        BOTH,
        (X, "'ring'", "point_to_point"),
    ),
    "moves without bytes under way": (
        lambda g: stretto.reshard_all([(g.x, g.far, R)], in_flight_bytes=0),
        BOTH,
        (X, "above 0"),
    ),
    "an op that gathers in the wrong order": (
        lambda g: torch.softmax(stretto.shard(torch.ones(4, 4), g.turned, [Shard(0)]), 0),
        BOTH,
        ("mesh [3, 0]", "do not ascend", "stretto.reshard"),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    misuse, ranks, says = MISUSES[name]
    for rank in ranks:
        with lone_rank(rank, 4):
            near, far = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
            x = stretto.shard(torch.randn(4, 6), near, [Shard(0)])
            y = stretto.shard(torch.randn(4, 6), far, [Replicate()])
            with pytest.raises(stretto.UsageError) as caught:
                misuse(Given(near, far, DeviceMesh("cpu", [3, 0]), x, y))
            for words in says:
                assert words in str(caught.value)


def test_a_plain_tensor_of_a_parts_shape_that_is_the_whole_is_taken() -> None:
    with lone_rank(0, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        x = stretto.shard(torch.ones(4, 6), mesh, [Replicate()])
        found = stretto.local(x + torch.ones(4, 6))
        assert found is not None
        assert torch.equal(found, torch.full((4, 6), 2.0))


def test_pytorchs_collectives_on_ranks_out_of_order() -> None:
    """The names of ranks in a group ascend whatever the mesh: the day they do not, the refusal can go."""
    with lone_rank(3, 4):
        mesh = DeviceMesh("cpu", [3, 0])
        assert mesh.get_coordinate() is not None
        assert tuple(mesh.get_coordinate()) == (0,)
        assert torch.distributed.get_process_group_ranks(mesh.get_group()) == [0, 3]
