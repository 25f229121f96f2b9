"""`reshard_all`: several tensors, and several meshes, at one time. One world of eight ranks on hosts of two.

Values, local shapes and gradients are those of the plain program. What ranks send is what the joint plan
says: the same messages, in its order, of its bytes, so that its makespan is that of what runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.tensor.clip import layout_on
from stretto.tensor.layout import region_count
from stretto.tensor.reshard.agree import agreement
from stretto.tensor.reshard.execute import PeerLinks, PieceMessage, pieces
from stretto.tensor.reshard.plan import plan_together
from stretto.tensor.reshard.tasks import Hosts, Tensor
from tests.cells import slow
from tests.tensor.reshard.test_execute import expected_part
from tests.tensor.world import all_end_well

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
Where = tuple[DeviceMesh, Sequence[Placement]]

RANKS, DEVICES = 8, 2
HOSTS = Hosts.of(DEVICES, RANKS)
LIMIT = 256
"""Bytes under way at most, in most cases: few, so that messages are in pieces and wait for one another."""


def ranged(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    values = torch.arange(count, dtype=torch.int64).reshape(tuple(shape)) % 101
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def check(x: DTensor, full: torch.Tensor, where: Where) -> None:
    part = stretto.local(x)
    expected = expected_part(full, (where[0], [R] * where[0].ndim), where)
    assert (x.device_mesh, tuple(x.placements)) == (where[0], tuple(where[1]))
    assert (part is None) == (expected is None)
    if part is not None and expected is not None:
        assert part.shape == expected.shape, where
        assert torch.equal(part, expected), (where, part, expected)


def several_tensors() -> None:
    """Of several dtypes and shapes, from several meshes to several, one within its own mesh, one a sum."""
    a, b = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [2, 4, 5, 7])
    square = DeviceMesh("cpu", [[4, 5], [6, 7]])
    for mode in ("broadcast", "point_to_point"):
        cases: list[tuple[torch.Tensor, Where, Where]] = [
            (ranged((7, 5)), (a, [S0]), (b, [S1])),
            (ranged((6,), torch.bool), (b, [R]), (a, [S0])),
            (ranged((9, 2), torch.int64), (a, [S0]), (a, [R])),
            (ranged((), torch.float32), (a, [R]), (square, [P, R])),
            (ranged((0, 3)), (a, [R]), (b, [S0])),
            (ranged((4, 6), torch.bfloat16), (square, [S1, S0]), (a, [R])),
            (ranged((5, 4)), (a, [R]), (square, [S0, P])),
        ]
        kept = [stretto.shard(full, *source) for full, source, _ in cases]
        moves = [(x, *target) for x, (_, _, target) in zip(kept, cases)]
        found = stretto.reshard_all(moves, mode=mode, in_flight_bytes=LIMIT)
        for x, (full, _, target) in zip(found, cases):
            check(x, full, target)
    assert stretto.reshard_all([]) == ()


def ways() -> list[tuple[Any, int]]:
    """Modes and limits of bytes: every mode with every limit, or every limit with some mode."""
    if os.environ["WAYS"] == "all":
        return list(product(("broadcast", "point_to_point"), (1, LIMIT, 1 << 20)))
    return [("broadcast", 1), ("point_to_point", LIMIT), ("broadcast", 1 << 20)]


def one_tensor_to_several_meshes() -> None:
    a, b, c = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [2, 3, 4]), DeviceMesh("cpu", [[5, 4], [7, 1]])
    full = ranged((9, 8))
    x = stretto.shard(full, a, [R])
    for targets in (
        [(b, [R]), (c, [R, R])],
        [(b, [S0]), (c, [S1, R])],
        [(b, [S0]), (c, [S0, S1]), (a, [R]), (b, [S1])],
        [(b, [P]), (c, [R, P]), (b, [R])],
    ):
        for mode, limit in ways():
            found = stretto.reshard_all(
                [(x, *target) for target in targets], mode=mode, in_flight_bytes=limit
            )
            for y, target in zip(found, targets):
                check(y, full, target)


def messages_are_those_of_the_plan() -> None:
    """Order, peers and bytes on each rank; bytes of all ranks, and between hosts."""
    a, b, c = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3]), DeviceMesh("cpu", [3, 4, 6])
    full_values = [ranged((40, 6)), ranged((30, 8), torch.float32)]
    sources: list[Where] = [(a, [S0]), (a, [R])]
    targets: list[tuple[int, Where]] = [(0, (b, [R])), (1, (c, [S0])), (0, (c, [S1])), (1, (b, [S1]))]
    kept = [stretto.shard(full, *source) for full, source in zip(full_values, sources)]
    sent: list[tuple[int, int]] = []
    received: list[tuple[int, int]] = []
    send, receive = PeerLinks.send, PeerLinks.receive

    def noting(self: PeerLinks, group: Any, buffer: torch.Tensor, peer: int, limit_bytes: int) -> None:
        sent.append((peer, buffer.numel()))
        send(self, group, buffer, peer, limit_bytes)
        assert self._sent_bytes <= LIMIT

    def receiving(self: PeerLinks, group: Any, buffer: torch.Tensor, peer: int) -> PieceMessage:
        received.append((peer, buffer.numel()))
        return receive(self, group, buffer, peer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerLinks, "send", noting)
        patch.setattr(PeerLinks, "receive", receiving)
        found = stretto.reshard_all([(kept[at], *to) for at, to in targets], in_flight_bytes=LIMIT)
    for y, (at, to) in zip(found, targets):
        check(y, full_values[at], to)
    tensors = [
        Tensor(
            tuple(full.shape),
            full.element_size(),
            layout_on(source[0], tuple(source[1])),
            [layout_on(to[0], tuple(to[1])) for at, to in targets if at == number],
        )
        for number, (full, source) in enumerate(zip(full_values, sources))
    ]
    planned = plan_together(tensors, HOSTS)
    assert [part for part in planned.parts if len(part[1]) > 1], "one is handed on between its targets"
    messages = [
        (here, there, tensors[planned.parts[one.tensor][0]].itemsize_bytes * region_count(box))
        for one in planned.plan.transfers
        for box in pieces(one.region, LIMIT // tensors[planned.parts[one.tensor][0]].itemsize_bytes)
        for here, there in pairwise((one.sender, *one.receivers))
    ]
    rank = dist.get_rank()
    assert sent == [(there, nbytes) for here, there, nbytes in messages if here == rank]
    assert received == [(here, nbytes) for here, there, nbytes in messages if there == rank]
    everything: list[Any] = [None] * RANKS
    dist.all_gather_object(everything, sent)
    all_sent = [(HOSTS[at] != HOSTS[to], nbytes) for at, each in enumerate(everything) for to, nbytes in each]
    assert sum(nbytes for _, nbytes in all_sent) == planned.plan.bytes_sent
    assert sum(nbytes for between, nbytes in all_sent if between) == planned.plan.link_bytes


Program = Callable[[torch.Tensor, torch.Tensor, Callable[..., Sequence[Any]]], torch.Tensor]


def gradients() -> None:
    """Against the plain program: all results used, one used twice, some not; a tensor that wants none."""
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 4, 5])
    square = DeviceMesh("cpu", [[1, 2], [3, 6]])
    plain = ranged((6, 4)).requires_grad_(), ranged((4, 5)).requires_grad_()

    def all_used(x: Any, w: Any, go: Any) -> Any:
        h, v, again = go([(x * x, b, [S0]), (w, b, [R]), (x, b, [S0])])
        return ((h @ v) ** 2).sum() + (again * again * h).sum()

    def one_tensor_twice(x: Any, w: Any, go: Any) -> Any:
        y = x * 2
        near, far, v = go([(y, b, [S1]), (y, square, [S0, R]), (w, square, [R, S1])])
        (back,) = go([((far @ v).sum(), b, [R])])
        return (near * near).sum() + back

    def some_unused(x: Any, w: Any, go: Any) -> Any:
        near, _, _ = go([(x * 3, b, [R]), (w * 2, b, [R]), (x * 3, square, [S1, S0])])
        return (near**3).sum()

    def sums_and_stays(x: Any, w: Any, go: Any) -> Any:
        h, v = go([(x, square, [P, S1]), (w, a, [R])])
        h, v = go([(h * 2, b, [R]), (v, b, [R])])
        return (h @ v).sum()

    for program in (all_used, one_tensor_twice, some_unused, sums_and_stays):
        for leaf in plain:
            leaf.grad = None
        program(*plain, lambda moves: [x for x, _, _ in moves]).backward()
        x = stretto.shard(ranged((6, 4)).requires_grad_(), a, [S0])
        w = stretto.shard(ranged((4, 5)).requires_grad_(), a, [R])
        loss = program(x, w, lambda moves: stretto.reshard_all(moves, in_flight_bytes=LIMIT))
        loss.backward()
        for found, leaf in ((x, plain[0]), (w, plain[1])):
            assert (found.grad is None) == (leaf.grad is None), program.__name__
            if leaf.grad is not None:
                assert isinstance(found.grad, DTensor)
                part = stretto.local(stretto.reshard(found.grad, a, [R]))
                assert part is None or torch.allclose(part, leaf.grad, rtol=1e-12), program.__name__
    # What wants no gradient has none, beside one that does.
    x = stretto.shard(ranged((6, 4)).requires_grad_(), a, [S0])
    counts = stretto.shard(ranged((3,), torch.int64), a, [R])
    fixed = stretto.shard(ranged((3, 4)), a, [R])
    h, n, f = stretto.reshard_all([(x, b, [R]), (counts, b, [R]), (fixed, b, [R])])
    assert [y.requires_grad for y in (h, n, f)] == [True, False, False]
    (h[:3] * f * n.sum()).sum().backward()
    part = stretto.local(x.grad) if x.grad is not None else None
    expected = torch.zeros(6, 4, dtype=torch.float64)
    expected[:3] = ranged((3, 4)) * 3
    assert isinstance(x.grad, DTensor)
    check(x.grad, expected, (a, tuple(x.grad.placements)))
    assert (part is None) == (dist.get_rank() not in (0, 1))


def sent_back_together() -> None:
    """Two tensors that went together: one agreed reshard on the way back, and none for an unused result."""
    a, b = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [2, 3])
    x, y = (stretto.shard(ranged((4, 4)).requires_grad_(), a, [R]) for _ in range(2))
    before = agreement().number
    h, v = stretto.reshard_all([(x, b, [R]), (y, b, [S0])])
    assert agreement().number == before + 1
    (h.sum() + v.sum()).backward()
    assert agreement().number == before + 2
    h, v = stretto.reshard_all([(x, b, [R]), (y, b, [S0])])
    v.sum().backward()
    assert agreement().number == before + 4


def eight_ranks() -> None:
    several_tensors()
    one_tensor_to_several_meshes()
    messages_are_those_of_the_plan()
    gradients()
    sent_back_together()


@pytest.mark.parametrize("ways", ["few", slow("all")])
def test_programs(ways: str) -> None:
    environment = {"LOCAL_WORLD_SIZE": str(DEVICES), "WAYS": ways}
    all_end_well([(RANKS, "tests.tensor.test_together:eight_ranks")], environment)
