"""Reshards on ranks: every placement to every other, on one mesh and between meshes, values and shapes exact.

Tensors have ranged values. Of a Partial tensor the ranks have different multiples, so that their sum is known
and no term is another. One launch runs many cases, so that processes start once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice, product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import stretto
from stretto.tensor.clip import layout_on
from stretto.tensor.dtensor_adapter import new_spec, wrapped
from stretto.tensor.reshard.tasks import MODES
from tests.tensor.world import all_end_well

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)


def ranged(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Values that name their place, small enough for a sum of several to be exact in bf16."""
    count = int(torch.Size(shape).numel())
    values = torch.arange(count, dtype=torch.int64).reshape(tuple(shape))
    return (values % 2 == 0) if dtype == torch.bool else ((values % 24) - 7).to(dtype)


def laid_out(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor so placed, made without what is tested: of a sum over an axis, its ranks have 1, 2, 3 .. times
    `full`."""
    layout = layout_on(mesh, tuple(placements))
    where = mesh.get_coordinate()
    local = full.new_empty(0)
    if where is not None:
        region = layout.region(tuple(full.shape), dist.get_rank())
        assert region is not None
        local = full[tuple(slice(start, stop) for start, stop in region)].clone()
        for axis in layout.partial_axes:
            local = local * (where[axis] + 1)
    return wrapped(DTensor, local, new_spec(mesh, placements, full.shape, full.stride(), full.dtype))


def ascends(mesh: DeviceMesh) -> bool:
    """Whether ranks ascend along each axis, as PyTorch's collectives need it."""
    return all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))


def expected_part(
    full: torch.Tensor,
    source: tuple[DeviceMesh, Sequence[Placement]],
    target: tuple[DeviceMesh, Sequence[Placement]],
) -> torch.Tensor | None:
    """What this rank must keep in the end; None off the mesh. A sum that stays keeps its terms."""
    layout = layout_on(target[0], tuple(target[1]))
    where, region = target[0].get_coordinate(), layout.region(tuple(full.shape), dist.get_rank())
    if where is None or region is None:
        return None
    same_mesh = source[0].mesh.tolist() == target[0].mesh.tolist()
    if not ascends(source[0]) and list(source[1]) != list(target[1]):
        same_mesh = False  # then its sums are taken, whatever is asked for
    part = full[tuple(slice(start, stop) for start, stop in region)]
    for axis, old in enumerate(source[1]):
        if old.is_partial():
            size = source[0].size(axis)
            stays = same_mesh and target[1][axis] == old
            part = part * (where[axis] + 1 if stays else size * (size + 1) // 2)
    for axis, new in enumerate(target[1]):
        if new == P and where[axis] > 0 and not (same_mesh and source[1][axis] == new):
            return torch.zeros_like(part)
    return part


def check(
    shape: Sequence[int],
    source: tuple[DeviceMesh, Sequence[Placement]],
    target: tuple[DeviceMesh, Sequence[Placement]],
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> None:
    """One reshard: description, shape of the part, and values, on every rank."""
    full = ranged(shape, dtype)
    y = stretto.reshard(laid_out(full, *source), *target, **options)  # type: ignore[arg-type]
    meshes = source[0].mesh.tolist(), target[0].mesh.tolist()
    case = f"{shape} {dtype} {source[1]} -> {target[1]}, meshes {meshes}"
    assert y.shape == full.shape, case
    assert y.dtype == dtype, case
    assert y.device_mesh == target[0], case
    assert y.placements == tuple(target[1]), case
    part, expected = stretto.local(y), expected_part(full, source, target)
    if part is None or expected is None:
        assert part is expected, case
        return
    assert part.shape == expected.shape, case
    assert torch.equal(part, expected), f"{case}: {part} is not {expected}"


def one_dim_meshes() -> None:
    """Meshes of one axis: equal and unequal, disjoint, overlapping, within one another, permuted."""
    meshes = [
        DeviceMesh("cpu", ranks)
        for ranks in ([0, 1], [2, 3], [1, 2], [0, 1, 2, 3], [3, 1, 0, 2], [4, 5, 6], [2], [1, 3, 5, 7, 0])
    ]
    kinds = (R, S0, S1, P)
    every = product(product(meshes, meshes), product(kinds, kinds))
    for (a, b), (old, new) in islice(every, None, None, stride()):
        check((5, 3), (a, [old]), (b, [new]))


def two_dim_meshes() -> None:
    """Meshes of two axes, and to fewer and more axes: every pair of placements."""
    kinds = list(product((R, S0, S1, P), repeat=2))
    square, other = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[4, 5], [6, 7]])
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
    wide = DeviceMesh("cpu", [[0, 1, 2], [5, 4, 3]])
    cube = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    for old, new in islice(product(kinds, kinds), None, None, stride()):
        check((6, 5), (square, old), (square, new))
        check((5, 6), (wide, old), (wide, new))
        check((6, 5), (square, old), (other, new))
        check((5, 4), (square, old), (wide, new))
    for old, new in islice(product(kinds[::3], kinds[::2]), None, None, stride()):
        check((7, 5), (square, old), (turned, new))
        check((7, 5), (cube, (*old, S1)), (square, new))
        check((7, 5), (square, old), (cube, (P, *new)))
        check((7, 5), (cube, (S0, *old)), (cube, (*new, R)))
    line = DeviceMesh("cpu", [6, 1, 3])
    for old, new in islice(product(kinds, (R, S0, S1, P)), None, None, stride()):
        check((4, 7), (wide, old), (line, [new]))
        check((4, 7), (line, [new]), (wide, old))


def odd_tensors() -> None:
    """Dtypes, 0-d tensors, uneven and empty shards, strides, several dims, a narrow limit, every mode."""
    a, b = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [4, 5, 6])
    half = DeviceMesh("cpu", [2, 3, 4, 5])
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
    ):
        for old, new in islice(product((R, S0, S1), (R, S0, S1)), None, None, few()):
            check((5, 6), (a, [old]), (b, [new]), dtype)
            check((5, 6), (a, [old]), (half, [new]), dtype)
    for dtype in (torch.int64, torch.int32, torch.bfloat16, torch.float32):
        for new in (R, S0, S1, P):
            check((8, 6), (a, [P]), (b, [new]), dtype)
            check((8, 6), (a, [P]), (a, [new]), dtype)
    for old, new in product((R, P), (R, P)):
        check((), (a, [old]), (b, [new]))
        check((), (a, [old]), (a, [new]))
    for shape in ((10, 2), (5, 2), (2, 3), (1, 1), (0, 4), (3, 0), (9,)):
        dims = [Shard(d) for d in range(len(shape))]
        for old, new in islice(product((R, P, *dims), (R, P, *dims)), None, None, few()):
            check(shape, (a, [old]), (b, [new]))
            check(shape, (a, [old]), (a, [new]))
    for reduction in ("avg", "max", "min"):
        check((5, 3), (a, [S0]), (b, [Partial(reduction)]))
        check((5, 3), (a, [S0]), (a, [Partial(reduction)]))
    for old, new in islice(product((S0, S1, S2, R, P), repeat=2), None, None, few()):
        check((3, 5, 7), (a, [old]), (b, [new]))
        for mode in MODES:
            for limit in (1, 24, 1 << 20):
                check((3, 2, 5), (a, [old]), (half, [new]), in_flight_bytes=limit, mode=mode)
    # A part whose memory is not in order.
    full = ranged((6, 4)).t()
    x = stretto.shard(full, a, [S0])
    y = stretto.local(stretto.reshard(x, b, [R]))
    assert (y is None) == (b.get_coordinate() is None)
    assert y is None or torch.equal(y, full)


def stride() -> int:
    """Every how many cases one is tried, of many."""
    return int(os.environ["STRIDE"])


def few() -> int:
    """Every how many cases one is tried, of few."""
    return min(stride(), 13)


def all_cases() -> None:
    """All programs on the same ranks, which takes less than ranks for each."""
    one_dim_meshes()
    two_dim_meshes()
    odd_tensors()


CASES = [(8, "tests.tensor.reshard.test_execute:all_cases")]


def test_transitions() -> None:
    """A part of them, which differs in both placements and meshes from one to the next."""
    all_end_well(CASES, {"STRIDE": "113"})


@pytest.mark.slow
def test_every_transition() -> None:
    all_end_well(CASES, {"STRIDE": "1"})
