"""`reshard_all` misused: every message names the move, the tensor, and what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import stretto
from tests.tensor.lone import lone_rank
from tests.tensor.world import worlds

R, S0 = Replicate(), Shard(0)

X = "float32 (4, 6) [Shard(0)] on mesh [0, 1]"
WRITE = "stretto.reshard_all([(x, mesh, placements), ...])"


def another_tensor_on_one_rank() -> None:
    """On rank 1 the second move is of another tensor, equal to the first in all that its name says."""
    dist.barrier()  # a rank that ends while others still connect would fail them in another way
    near, far = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    x = stretto.shard(torch.ones(4, 6), near, [S0])
    y = stretto.shard(torch.ones(4, 6), near, [S0]) if dist.get_rank() == 1 else x
    stretto.reshard_all([(x, far, [R]), (y, near, [R])])


def test_a_rank_that_moves_another_tensor_ends_all_of_them() -> None:
    (ended,) = worlds([(3, "tests.tensor.test_together_refused:another_tensor_on_one_rank")])
    assert None not in ended.statuses
    assert ended.statuses != (0, 0, 0)
    moves = f"of tensor {X} to [Replicate()] on mesh [1, 2], and of the tensor of move 0 to"
    assert moves in ended.output
    assert "RunError" in ended.output


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda x, far: stretto.reshard([x, x], far, [R]), ("takes one tensor, not a list", WRITE)),
        (lambda x, far: stretto.reshard(x, [far, far], [R]), (X, "takes one DeviceMesh, not 2", WRITE)),
        (lambda x, far: stretto.reshard_all(x), (X, "is not a list of moves", WRITE)),
        (lambda x, far: stretto.reshard_all([x, x]), ("move 0", X, "is not a tensor, its mesh", WRITE)),
        (lambda x, far: stretto.reshard_all([(x, far)]), ("move 0", "is not a tensor, its mesh", WRITE)),
        (
            lambda x, far: stretto.reshard_all([(x, far, [R]), (torch.ones(4), far, [R])]),
            ("move 1", "plain tensor float32 (4,)", "stretto.shard(it, mesh, placements)"),
        ),
        (
            lambda x, far: stretto.reshard_all([(x, far, [R]), (x, far, [Shard(2)])]),
            ("move 1", X, "no dim 2", "mesh [2]"),
        ),
        (
            lambda x, far: stretto.reshard_all([(x, far, [R])], mode="ring"),
            (X, "'ring'", "point_to_point"),
        ),
        (lambda x, far: stretto.reshard_all([(x, far, [R])], in_flight_bytes=0), (X, "above 0")),
    ],
)  # fmt: skip
def test_misuse_names_the_move_the_tensor_and_what_to_write(misuse: Any, says: tuple[str, ...]) -> None:
    with lone_rank(3, 4):
        x = stretto.shard(torch.randn(4, 6), DeviceMesh("cpu", [0, 1]), [S0])
        with pytest.raises(stretto.UsageError) as caught:
            misuse(x, DeviceMesh("cpu", [2]))
        for words in says:
            assert words in str(caught.value)
