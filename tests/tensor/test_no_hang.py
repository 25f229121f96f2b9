"""A misuse on one rank only ends all ranks, soon, with an error: none hangs, none goes on with other numbers.

Each function is a program in which one rank does not do as the others. All run in one launch.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import stretto
from stretto.tensor.reshard import agree, execute
from stretto.tensor.reshard.agree import PATIENCE_S
from tests.tensor.world import worlds

R = [Replicate()]


LOOK_S = 0.2
"""How often ranks look for an alarm here."""


def given() -> tuple[DeviceMesh, DeviceMesh, torch.Tensor]:
    agree.LOOK_S = execute.LOOK_S = LOOK_S
    near, far = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    return near, far, stretto.shard(torch.ones(4, 4), near, [Shard(0)])


def another_tensor() -> None:
    """On rank 1 the second move is of another tensor, equal to the first in all that its name says."""
    near, far, x = given()
    y = stretto.shard(torch.ones(4, 4), near, [Shard(0)])
    stretto.reshard_all([(x, far, R), (y if dist.get_rank() == 1 else x, near, R)])


def skips_and_goes_on() -> None:
    near, far, x = given()
    if dist.get_rank() != 0:
        stretto.reshard(x, far, R)
    stretto.reshard(stretto.reshard(x, far, [Shard(1)]), near, R)


def skips_and_ends() -> None:
    _, far, x = given()
    stretto.reshard(x, far, R)
    if dist.get_rank() != 1:
        stretto.reshard(x, far, R)


def skips_the_backward_pass() -> None:
    near, far, _ = given()
    w = stretto.shard(nn.Parameter(torch.ones(4, 4)), near, R)
    loss = stretto.reshard(w * 2, far, R).sum()
    if dist.get_rank() != 2:
        loss.backward()


def is_killed() -> None:
    _, far, x = given()
    stretto.reshard(x, far, R)
    if dist.get_rank() == 1:
        os._exit(9)
    stretto.reshard(x, far, R)


def waits_elsewhere() -> None:
    _, far, x = given()
    stretto.reshard(x, far, R)
    os.environ["STRETTO_RESHARD_PATIENCE_S"] = "1"
    if dist.get_rank() == 1:
        dist.barrier()
    stretto.reshard(x, far, R)


def late_but_well() -> None:
    """No misuse: one rank is busy for a while, and the others wait meanwhile, in a reshard and elsewhere."""
    near, far, x = given()
    for busy in (lambda: time.sleep(4 * LOOK_S), compute):
        if dist.get_rank() == 1:
            busy()
        y = stretto.reshard(x, far, [Shard(1)])
        if dist.get_rank() == 2:
            time.sleep(2 * LOOK_S)
        back = stretto.local(stretto.reshard(y, near, [Shard(0)]))
        assert back is None or torch.equal(back, torch.ones(2, 4))
        dist.barrier()


def compute() -> None:
    end, x = time.monotonic() + 4 * LOOK_S, torch.ones(300, 300)
    while time.monotonic() < end:
        x = x @ x / 300


def ends_early_and_well() -> None:
    """No misuse: the first stage sends its last, and ends long before it is taken."""
    near, far = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1, 2])
    x = stretto.shard(torch.arange(12.0).reshape(3, 4), near, R)
    if dist.get_rank() != 0:
        time.sleep(0.5)
    part = stretto.local(stretto.reshard(x, far, R, in_flight_bytes=1000))
    assert (part is not None) == (dist.get_rank() in (1, 2))
    assert part is None or torch.equal(part, torch.arange(12.0).reshape(3, 4))


FAILURES: dict[str, tuple[int, str]] = {
    "another_tensor": (1, "and of the tensor of move 0 to"),
    "skips_and_goes_on": (0, "[Shard(1)] on mesh [1, 2]"),
    "skips_and_ends": (1, "rank 1"),
    "skips_the_backward_pass": (2, "rank 2"),
    "is_killed": (1, "rank 1"),
    "waits_elsewhere": (1, "has waited 1 s in reshard number 2 (to"),
}
"""Who is the odd one, and what some rank's error says."""

MAY_END_WELL = {"skips_and_ends": {1}, "skips_the_backward_pass": {0, 1, 2}}
"""Who does less than the others, and who needs nothing of it; but one rank says so at least."""

BYSTANDER = 3
"""Is on neither mesh, and may be through with its program before another fails."""


FEW = ("another_tensor", "skips_and_ends", "waits_elsewhere")


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(FAILURES), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_one_rank_that_differs_ends_all_of_them(names: tuple[str, ...]) -> None:
    well_made = ("late_but_well", "ends_early_and_well")
    found = worlds([(4, f"tests.tensor.test_no_hang:{name}") for name in (*names, *well_made)])
    wrong = []
    for name, ended in zip(names, found):
        _, says = FAILURES[name]
        # It is the difference that ends them, and not that they wait no longer.
        may_end_well = MAY_END_WELL.get(name, set()) | {BYSTANDER}
        well = {rank for rank, status in enumerate(ended.statuses) if status == 0}
        hung = None in ended.statuses
        if (
            hung
            or not well <= may_end_well
            or len(well) == 4
            or ended.seconds > PATIENCE_S / 3
            or says not in ended.output
        ):
            wrong.append(f"{name}: {ended.statuses}, {ended.seconds:.1f} s, {says!r}\n{ended.output}")
        print(f"{name}: {ended.statuses} {ended.seconds:.1f} s")
    assert not wrong, "\n".join(wrong)
    for ended in found[len(names) :]:
        assert ended.statuses == (0, 0, 0, 0), ended.output
