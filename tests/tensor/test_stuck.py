"""A rank that skips a reshard and stands somewhere else ends all ranks; a busy one is waited for.

Each function is a program. They run at a quick pace, and one, slow, at the pace that users get.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import stretto
from stretto.tensor.reshard import agree, lines, stuck
from stretto.tensor.reshard.stuck import ENDED_ROUND, Pace, Word, verdict
from tests.tensor.world import Ended, worlds

R = [Replicate()]

QUICK = Pace(look_s=0.1, stands_s=0.3, round_s=0.3, end_s=0.5)
"""A rank that waits in a reshard is then found some 1.2 s after the last one has begun to stand."""

LONG_S = 3.0
"""Longer than the quick pace needs to find out anything."""

USERS_PACE = "STRETTO_TEST_USERS_PACE"


def begin() -> torch.Tensor:
    if USERS_PACE not in os.environ:
        stuck.PACE = QUICK
        agree.LOOK_S = lines.LOOK_S = 0.2
    return stretto.shard(torch.arange(12.0).reshape(3, 4), DeviceMesh("cpu", [0]), R)


def sent_to(x: torch.Tensor, rank: int) -> torch.Tensor:
    return stretto.reshard(x, DeviceMesh("cpu", [rank]), R)


def in_barrier() -> None:
    x = sent_to(begin(), 1)
    if dist.get_rank() == 1:
        dist.barrier()
    sent_to(x, 0)


def in_barrier_before_the_first() -> None:
    """No connections are there yet, and rank 0 has made no reshard at all."""
    x = begin()
    if dist.get_rank() == 0:
        dist.barrier()
    sent_to(x, 1)


def in_all_reduce() -> None:
    """A rank off both meshes does not end, but waits for the others with a collective of its own."""
    x = sent_to(begin(), 1)
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(3))
    sent_to(x, 0)
    dist.barrier()


def off_the_meshes() -> None:
    """A rank that has nothing to do in a reshard skips it, and the others wait for it elsewhere."""
    x = begin()
    if dist.get_rank() == 2:
        dist.recv(torch.ones(3), src=0)
    sent_to(sent_to(x, 1), 0)
    dist.barrier()


def in_recv() -> None:
    x = sent_to(begin(), 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), src=0)
    sent_to(x, 0)


def in_dtensor_op() -> None:
    """On a mesh of its own, to which rank 0 does not come."""
    x = sent_to(begin(), 1)
    mesh = DeviceMesh("cpu", [0, 1])
    y = stretto.shard(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    if dist.get_rank() == 1:
        _ = torch.relu(y.redistribute(mesh, R)) + 1
    sent_to(x, 0)


def in_backward() -> None:
    """Data parallelism waits below the backward pass, in no Python frame."""
    x = sent_to(begin(), 1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    if dist.get_rank() == 1:
        model(torch.ones(3, 4)).sum().backward()
    sent_to(x, 0)


def none_waits_in_a_reshard() -> None:
    """A sender runs ahead, so that nobody waits for what the receiver skips."""
    x = begin()
    sent_to(x, 1)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(3), src=0)
    sent_to(x, 1)
    dist.barrier()


STUCK: dict[str, tuple[int, int, str]] = {
    "in_barrier": (2, 1, "`dist.barrier()`"),
    "off_the_meshes": (3, 2, "`dist.recv(torch.ones(3), src=0)`"),
    "in_recv": (3, 1, "`dist.recv(torch.ones(3), src=0)`"),
    "in_barrier_before_the_first": (2, 0, "`dist.barrier()`"),
    "in_all_reduce": (3, 1, "`dist.all_reduce(torch.ones(3))`"),
    "in_dtensor_op": (2, 1, "`_ = torch.relu(y.redistribute(mesh, R)) + 1`"),
    "in_backward": (2, 1, "`model(torch.ones(3, 4)).sum().backward()`"),
    "none_waits_in_a_reshard": (2, 1, "`dist.recv(torch.ones(3), src=0)`"),
}
"""On how many ranks, who is the odd one, and where it stands."""

MAY_END_WELL = {"in_recv": {2}}
"""Who needs none of the others."""


def late_but_well() -> None:
    """No misuse: one rank is busy for long, and the others stand meanwhile, in a reshard and elsewhere."""
    x, rank = begin(), dist.get_rank()
    for busy in (lambda: time.sleep(LONG_S), hold_python, compute, wait_for_a_thread):
        y = sent_to(x, 1)
        if rank == 1:
            busy()
        if rank == 2:
            dist.recv(torch.ones(3), src=1)
        back = stretto.local(sent_to(y, 0))
        assert back is None or torch.equal(back, torch.arange(12.0).reshape(3, 4))
        if rank == 1:
            dist.send(torch.ones(3), dst=2)
        dist.barrier()


def hold_python() -> None:
    """Some 3 s in one call that lets no other thread run: not even the look-out, whose last word is old."""
    assert 3**9_000_000 > 0


def compute() -> None:
    end, x = time.monotonic() + LONG_S, torch.ones(300, 300)
    while time.monotonic() < end:
        x = x @ x / 300


def wait_for_a_thread() -> None:
    """Here the program stands in a communication with another thread of its own rank's making, at work."""
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()


def test_the_verdict_needs_all_ranks_and_a_reshard() -> None:
    waits = Word(0, 7, True, 4, True, "waits in reshard number 4, at a.py:1")
    stands = Word(1, 7, True, 3, False, "stands at a.py:2")
    found = verdict([waits, stands, Word(2, 7, True, 3, False, "stands at a.py:2")], 7)
    assert found is not None
    assert "  rank 0 waits in reshard number 4, at a.py:1\n  ranks 1, 2 stands at a.py:2\n" in found
    assert verdict([waits, Word(1, ENDED_ROUND, False, 4, False, "has ended")], 7) is not None
    # one has moved since the round before; one has not taken part in this one
    assert verdict([waits, Word(1, 7, False, 3, False, "stands")], 7) is None
    assert verdict([waits, Word(1, 6, True, 3, False, "stands")], 7) is None
    # all stand in collectives of the program's own, as many reshards behind them
    assert verdict([Word(rank, 7, True, 3, False, "stands") for rank in range(2)], 7) is None
    # as many, but not all behind them; or nobody waits in one, but one has skipped some
    assert verdict([Word(0, 7, True, 3, True, "waits"), Word(1, 7, True, 3, False, "stands")], 7) is not None
    assert verdict([Word(rank, 7, True, rank, False, "stands") for rank in range(2)], 7) is not None


def test_a_word_is_read_as_it_was_written() -> None:
    word = Word(5, 12, True, 3, False, "stands at a.py:2, `x | y`")
    assert Word.read(5, word.written()) == word


def wrong(name: str, ended: Ended, within_s: float) -> str:
    _, odd, where = STUCK[name]
    may_end_well = MAY_END_WELL.get(name, set())
    well = {rank for rank, status in enumerate(ended.statuses) if status == 0}
    says = [line for line in ended.output.splitlines() if f"  rank {odd} " in line and where in line]
    print(f"{name}: {ended.statuses} {ended.seconds:.1f} s")
    if None in ended.statuses or not well <= may_end_well or ended.seconds > within_s or not says:
        return f"{name}: {ended.statuses}, {ended.seconds:.1f} s\n{ended.output}"
    return ""


FEW = ("in_barrier", "off_the_meshes")


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(STUCK)[len(FEW) :], marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_a_rank_that_stands_elsewhere_ends_all_of_them(names: tuple[str, ...]) -> None:
    found = worlds([(STUCK[name][0], f"tests.tensor.test_stuck:{name}") for name in names])
    assert not "\n".join(filter(None, map(lambda name, ended: wrong(name, ended, 20), names, found)))


@pytest.mark.slow
def test_a_busy_rank_is_waited_for() -> None:
    (ended,) = worlds([(3, "tests.tensor.test_stuck:late_but_well")])
    print(f"late_but_well: {ended.statuses} {ended.seconds:.1f} s")
    assert ended.statuses == (0, 0, 0), ended.output


@pytest.mark.slow
def test_at_the_pace_that_users_get_all_have_ended_within_30_s() -> None:
    names = ("in_barrier", "off_the_meshes", "none_waits_in_a_reshard")
    programs = [(STUCK[name][0], f"tests.tensor.test_stuck:{name}") for name in names]
    found = worlds(programs, {USERS_PACE: "1"})
    assert not "\n".join(filter(None, map(lambda name, ended: wrong(name, ended, 30), names, found)))
