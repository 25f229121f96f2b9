"""Carries a reshard plan out: this rank's part of the transfers, piece by piece.

    1. Copy what this rank already has.
    2. Walk the plan's transfers, of all its tensors, in their order, which is the same on all ranks. Of each,
       cut into pieces that all ranks cut in the same way, this rank receives a piece from the one before it
       in the chain, if there is one, and hands it on to the one after it, if there is one.
    3. Receives are started ahead of their turn, as many bytes as the limit allows, so that pieces are under
       way while others are handed on.

A rank has its parts of the sources, its parts of the targets, and pieces under way: never more of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stretto.tensor.layout import Region, region_count, region_shape
from stretto.tensor.reshard.lines import PeerLinks, PieceMessage
from stretto.tensor.reshard.plan import ReshardPlan


@dataclass(frozen=True, slots=True)
class LocalBox:
    """This rank's part of a tensor: the box, and its elements. Without a box the rank is off the mesh."""

    region: Region | None
    tensor: torch.Tensor | None

    def holds(self, box: Region) -> bool:
        """Whether a box lies within the part."""
        if self.region is None:
            return False
        return all(first <= start and stop <= last for (start, stop), (first, last) in zip(box, self.region))

    def at(self, box: Region) -> torch.Tensor:
        """The elements of a box within the part; not a copy."""
        assert self.region is not None, "the plan reads and writes only on the mesh"
        assert self.tensor is not None, "a rank of the mesh has a part"
        result = self.tensor
        for dim, ((start, stop), (first, _)) in enumerate(zip(box, self.region)):
            result = result.narrow(dim, start - first, stop - start)
        return result


@dataclass(frozen=True, slots=True)
class PieceStep:
    """This rank's turn with one piece of a tensor: receive it, hand it on, or both."""

    tensor: int
    box: Region
    nbytes: int
    before: int | None
    after: int | None


def execute(
    plan: ReshardPlan,
    sources: Sequence[LocalBox],
    targets: Sequence[Sequence[LocalBox]],
    lines: PeerLinks,
    group: dist.ProcessGroup,
    limit_bytes: int,
) -> None:
    """Fill the targets' parts on this rank, and send what others need of the sources'.

    sources: this rank's part of each tensor that the plan speaks of. targets: of each, its parts of all the
    layouts that the tensor goes to. group: over all ranks of all layouts. limit_bytes: how many bytes of sent
    pieces, and as many of awaited ones, may be under way on this rank, of all tensors together.
    Returns when this rank has its parts; what it sent may still be under way.
    Raises RunError if a rank that it needs is lost or makes another reshard.
    """
    rank = lines.agreed.rank
    for copy in plan.copies:
        if copy.rank == rank:
            kept = sources[copy.tensor].at(copy.region)
            for place in _places(targets[copy.tensor], copy.region):
                place.copy_(kept)
    # An accelerator's stream does one after the other: what is started ahead would wait in front.
    filled = [part.tensor for parts in targets for part in parts if part.tensor is not None]
    ahead = all(tensor.device.type == "cpu" for tensor in filled)
    steps = list(_steps(plan, rank, limit_bytes))
    awaited: dict[int, tuple[PieceMessage, torch.Tensor]] = {}
    awaited_bytes = 0
    started = 0
    for at, step in enumerate(steps):
        while started < len(steps) and (
            started <= at or (steps[started].nbytes + awaited_bytes <= limit_bytes and ahead)
        ):
            if steps[started].before is not None:
                awaited[started] = _receive(lines, group, steps[started], targets)
                awaited_bytes += steps[started].nbytes
            started += 1
        if at in awaited:
            message, piece = awaited.pop(at)
            lines.wait(message)
            awaited_bytes -= step.nbytes
            for place in _places(targets[step.tensor], step.box):
                if place.data_ptr() != piece.data_ptr():
                    place.copy_(piece)
        if step.after is not None:
            if step.before is not None:
                sent = _places(targets[step.tensor], step.box)[0]
            else:
                sent = sources[step.tensor].at(step.box)
            copied = sent.clone(memory_format=torch.contiguous_format)
            lines.send(group, _bytes(copied), step.after, limit_bytes)


def _places(parts: Sequence[LocalBox], box: Region) -> list[torch.Tensor]:
    """Where a box lies in the parts that have it, one at least; boxes lie within a part or beside it."""
    result = [part.at(box) for part in parts if part.holds(box)]
    assert result, "the plan sends a rank what it needs"
    return result


def _receive(
    lines: PeerLinks, group: dist.ProcessGroup, step: PieceStep, targets: Sequence[Sequence[LocalBox]]
) -> tuple[PieceMessage, torch.Tensor]:
    """Start to receive a piece: into its place where that is one stretch of memory, else aside."""
    assert step.before is not None
    piece = _places(targets[step.tensor], step.box)[0]
    if not piece.is_contiguous():
        piece = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
    return lines.receive(group, _bytes(piece), step.before), piece


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: bytes, for transports know few dtypes."""
    return x.detach().view(-1).view(torch.uint8)


def _steps(plan: ReshardPlan, rank: int, limit_bytes: int) -> Iterator[PieceStep]:
    for transfer in plan.transfers:
        chain = (transfer.sender, *transfer.receivers)
        if rank not in chain:
            continue
        at = chain.index(rank)
        itemsize = transfer.nbytes // region_count(transfer.region)
        # A plain message needs pieces only so that its copy stays below the limit.
        largest = min(limit_bytes, plan.piece_bytes) if len(chain) > 2 else limit_bytes
        for box in pieces(transfer.region, max(1, largest // itemsize)):
            yield PieceStep(
                transfer.tensor,
                box,
                region_count(box) * itemsize,
                chain[at - 1] if at > 0 else None,
                chain[at + 1] if at + 1 < len(chain) else None,
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
