"""Every op of the sweep with every placement, on ranks of a mesh and one off it: right, or refused by all.

`swept` runs on each rank of a world. Values and gradients are compared with the plain op in float64, and what
the ranks see of results, those off the mesh too, must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

import stretto
from stretto.tensor.clip import is_absent
from tests.tensor.sweep_cases import LOSE_A_WRITE, Case, cases, ranged

Placements = tuple[tuple[Placement, ...], ...]

WHICH = "STRETTO_SWEEP"
"""The environment variable that says what of the sweep a world makes: ranks of the mesh, sizes of dims, how
many placements, and of so many parts of the ops which one, such as "2x2:5x7,4x6:wide:0/3"."""


ANSWERS = "answers: "
"""Before the number of cases that ranks have answered alike, in what they print."""


def swept() -> None:
    """What each rank of a world does."""
    ranks, sizes, wide, part = os.environ[WHICH].split(":")
    first, step = (int(number) for number in part.split("/"))
    shape = [int(size) for size in ranks.split("x")]
    count = torch.Size(shape).numel()
    mesh = DeviceMesh("cpu", torch.arange(count).reshape(shape))
    mine: list[tuple[str, str, str]] = []
    for size in sizes.split(","):
        n, m = (int(s) for s in size.split("x"))
        for name, (op, tensors) in list(cases(n, m).items())[first::step]:
            leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
            expected = [*_results(op, leaves), *(x.grad for x in leaves)]
            for placements in _placements(tensors, mesh.ndim, wide == "wide"):
                answer = _one((op, tensors), expected, placements, mesh)
                mine.append((f"{name} {size} {placements}", *answer))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    failed = []
    for answers in zip(*everyone, strict=True):
        where, found, _ = answers[0]
        if len(set(answers)) > 1:
            failed.append(f"{where}: ranks differ: {answers}")
        elif found != "right" and not (found == "refused" and where.startswith(LOSE_A_WRITE)):
            failed.append(f"{where}: {found}")
    assert not failed, f"{len(failed)} of {len(mine)}:\n" + "\n".join(failed)
    if dist.get_rank() == 0:
        print(f"{ANSWERS}{len(mine)}")


def _placements(tensors: Sequence[torch.Tensor], axes: int, wide: bool) -> Iterator[Placements]:
    """Each tensor along each of its dims, alone and with its like; each, and all, Partial."""
    found: dict[Placements, None] = {}
    for at, x in enumerate(tensors):
        for dim in range(x.ndim):
            cut, full = Shard(dim), Replicate()
            together = [cut if t.shape == x.shape else full for t in tensors]
            rows = [cut if t.ndim > dim and t.shape[dim] == x.shape[dim] else full for t in tensors]
            alone = [cut if t is x else full for t in tensors]
            for one in (together, rows, alone) if wide else (rows, alone) if at == 0 else (rows,):
                found[tuple((p,) for p in one)] = None
    if wide or len(tensors) == 1:
        for x in tensors:
            if x.is_floating_point():
                found[tuple((Partial() if t is x else Replicate(),) for t in tensors)] = None
    if wide:
        found[tuple((Replicate(),) for _ in tensors)] = None
        found[tuple((Partial() if t.is_floating_point() else Replicate(),) for t in tensors)] = None
    if axes == 1:
        yield from found
        return
    pairs = list(found)
    for first, second in zip(pairs, pairs[1:] + pairs[:1], strict=True):
        yield tuple((a[0], b[0]) for a, b in zip(first, second, strict=True))


def _one(
    case: Case, expected: list[torch.Tensor | None], placements: Placements, mesh: DeviceMesh
) -> tuple[str, str]:
    """How an op ends, and what this rank sees of its results."""
    op, tensors = case
    try:
        given = [_placed(x, p, mesh) for x, p in zip(tensors, placements, strict=True)]
        results = _results(op, given)
    except stretto.UsageError:
        return "refused", ""
    except Exception as error:  # every other one is a fault
        return f"{type(error).__name__}: {error}", ""
    found = [*results, *(x.grad for x in given)]
    seen = str([(x.shape, x.dtype, x.placements) if isinstance(x, DTensor) else x for x in found])
    if is_absent(mesh):
        return "right", seen
    if len(found) != len(expected):
        return f"{len(results)} results", seen
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not _equal(one, other):
            return f"wrong {'value' if at < len(results) else 'gradient'} number {at}", seen
    return "right", seen


def _placed(x: torch.Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> torch.Tensor:
    """A tensor on the mesh; of a sum, each rank has a partial sum, none of them zero."""
    shown = [Replicate() if p.is_partial() else p for p in placements]
    made = stretto.shard(x.clone(), mesh, shown)
    if Partial() in placements:
        partial_sum = ranged(*x.shape, phase=3.0).to(x.dtype)
        full = stretto.shard(x.clone(), mesh, placements)
        ranks = torch.Size(mesh.size(a) for a, p in enumerate(placements) if p.is_partial()).numel()
        others = [Replicate() if p.is_partial() else p for p in placements]
        local = stretto.local(full)
        if local is not None:
            first = all(mesh.get_local_rank(a) == 0 for a, p in enumerate(placements) if p.is_partial())
            part = stretto.local(stretto.shard(partial_sum, mesh, others))
            assert part is not None
            local += part * (1 - ranks) if first else part
        made = full
    return made.requires_grad_(x.is_floating_point())


def _results(op: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What an op gives; gradients of a sum of it that distinguishes all places."""
    results = [x for x in tree_leaves(op(*tensors)) if isinstance(x, torch.Tensor)]
    sums = [(x * ranged(*x.shape, phase=0.7)).sum() for x in results if x.requires_grad]
    if sums:
        sum(sums[1:], sums[0]).backward()
    return [x.detach() for x in results]


def _equal(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if expected is None or found is None:
        rest = found if expected is None else expected
        return rest is None or not bool(_full(rest).any())
    full = _full(found)
    return full.dtype == expected.dtype and torch.allclose(full, expected, rtol=1e-10, atol=1e-10)


def _full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x
