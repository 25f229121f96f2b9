"""Carries a reshard plan out: this rank's part of the transfers, piece by piece.

    1. Copy what this rank already holds.
    2. Walk the plan's transfers in their order, which is the same on all ranks. Of each, cut into pieces that
       all ranks cut alike, this rank receives a piece from the one before it in the chain, if there is one,
       and hands it on to the one after it, if there is one.
    3. Receives are started ahead of their turn, as many bytes as the limit allows, so that pieces are under
       way while others are handed on.

A rank holds its part of the source, its part of the target, and pieces under way: never more of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stretto.tensor.layout import Layout, Region, region_count, region_shape
from stretto.tensor.reshard.lines import Lines, Message
from stretto.tensor.reshard.plan import ReshardPlan


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a tensor: the box, and its elements (None: the rank is off the mesh)."""

    region: Region | None
    tensor: torch.Tensor | None

    def at(self, box: Region) -> torch.Tensor:
        """The elements of a box within the part; not a copy."""
        assert self.region is not None, "the plan reads and writes only on the mesh"
        assert self.tensor is not None, "a rank of the mesh has a part"
        found = self.tensor
        for dim, ((start, stop), (first, _)) in enumerate(zip(box, self.region)):
            found = found.narrow(dim, start - first, stop - start)
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """This rank's turn with one piece: receive it, hand it on, or both."""

    box: Region
    nbytes: int
    before: int | None
    after: int | None
    from_target: bool


def part_of(layout: Layout, shape: tuple[int, ...], rank: int, tensor: torch.Tensor | None) -> Part:
    """The part of a rank. tensor: its elements, of the region's shape."""
    region = layout.region(shape, rank)
    return Part(region, None if region is None else tensor)


def execute(
    plan: ReshardPlan,
    source: Part,
    target: Part,
    lines: Lines,
    group: dist.ProcessGroup,
    limit_bytes: int,
) -> None:
    """Fill the target's part on this rank, and send what others need of the source's.

    group: over all ranks of both layouts. limit_bytes: how many bytes of
    sent pieces, and as many of awaited ones, may be under way on this rank.
    Returns when this rank has its part; what it sent may still be under way.
    Raises RunError if a rank that it needs is lost or makes another reshard.
    """
    rank = lines.agreed.rank
    for copy in plan.copies:
        if copy.rank == rank:
            target.at(copy.region).copy_(source.at(copy.region))
    steps = list(_steps(plan, rank, limit_bytes))
    awaited: dict[int, tuple[Message, torch.Tensor | None]] = {}
    awaited_bytes = 0
    started = 0
    for at, step in enumerate(steps):
        # An accelerator's stream does one after the other: what is started ahead would wait in front.
        while started < len(steps) and (
            started <= at or (steps[started].nbytes + awaited_bytes <= limit_bytes and _may_run_ahead(target))
        ):
            if steps[started].before is not None:
                awaited[started] = _receive(lines, group, steps[started], target)
                awaited_bytes += steps[started].nbytes
            started += 1
        if at in awaited:
            message, aside = awaited.pop(at)
            lines.wait(message)
            awaited_bytes -= step.nbytes
            if aside is not None:
                target.at(step.box).copy_(aside)
        if step.after is not None:
            held = target if step.from_target else source
            lines.send(
                group,
                _bytes(held.at(step.box).clone(memory_format=torch.contiguous_format)),
                step.after,
                limit_bytes,
            )


def _may_run_ahead(target: Part) -> bool:
    return target.tensor is None or target.tensor.device.type == "cpu"


def _receive(
    lines: Lines, group: dist.ProcessGroup, step: Step, target: Part
) -> tuple[Message, torch.Tensor | None]:
    """Start to receive a piece: into its place where that is one stretch of memory, else aside."""
    assert step.before is not None
    place = target.at(step.box)
    aside = (
        None if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype, device=place.device)
    )
    return lines.receive(group, _bytes(place if aside is None else aside), step.before), aside


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: bytes, for transports know few dtypes."""
    return x.detach().view(-1).view(torch.uint8)


def _steps(plan: ReshardPlan, rank: int, limit_bytes: int) -> Iterator[Step]:
    for transfer in plan.transfers:
        chain = (transfer.sender, *transfer.receivers)
        if rank not in chain:
            continue
        at = chain.index(rank)
        itemsize = transfer.nbytes // region_count(transfer.region)
        # A plain message needs pieces only so that its copy stays below the limit.
        largest = min(limit_bytes, plan.piece_bytes) if len(chain) > 2 else limit_bytes
        for box in pieces(transfer.region, max(1, largest // itemsize)):
            yield Step(
                box,
                region_count(box) * itemsize,
                chain[at - 1] if at > 0 else None,
                chain[at + 1] if at + 1 < len(chain) else None,
                at > 0 or transfer.after is not None,
            )


def pieces(region: Region, largest: int) -> Iterator[Region]:
    """A box cut into boxes of at most `largest` elements, in the order of its elements.

    It is cut along the first dims only, so that pieces of one stretch of memory stay one stretch.
    """
    if region_count(region) <= largest:
        yield region
        return
    sizes = region_shape(region)
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    start, stop = region[dim]
    inner = math.prod(sizes[dim + 1 :])
    rows = max(1, largest // inner)
    for first in range(start, stop, rows):
        box = (*region[:dim], (first, min(first + rows, stop)), *region[dim + 1 :])
        yield from pieces(box, largest)
