"""Copies start equal: tensors that several ranks have are compared when they make their Runners. Each rank
takes its values from the model of its own process; copies that start apart train apart, and no loss shows it.

    1. What other ranks have too: data-parallel copies, tied ones, what tensor-parallel ranks do not shard,
       and the full tensors from which they cut their parts. Not buffers that the model writes, of which every
       data-parallel copy keeps its own.
    2. A digest of each, made on its device.
    3. All ranks gather the digests of all, so that they come to one verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from stretto.errors import UsageError, listed
from stretto.ir.program import Job
from stretto.runtime.fit import pipeline_ranks
from stretto.runtime.rank_tensors import RankTensors
from stretto.runtime.transport import Transport

Copy = tuple[str, tuple[int, ...]]
"""What it is (`parameter 'head.weight'`), and which part: coordinates on the axes over which it has parts."""

CHUNK = 2**18
"""Words that are summed at once: enough to keep a device busy, and 2 MiB as integers."""

MIX = 0xBF58476D1CE4E5B9 - 2**64
"""The first factor of splitmix64 (Steele, Lea and Flood 2014), as a signed number."""


def check_copies(tensors: RankTensors, transport: Transport) -> None:
    """Every rank must call it. Raises UsageError on all ranks when two have different copies."""
    if transport.size == 1:
        return
    kept = _copies(tensors)
    gathered = _difference(transport.all_gather({copy: digest(tensor) for copy, tensor in kept.items()}))
    if gathered:
        raise UsageError(
            f"{gathered}: copies that start apart stay apart. Seed all ranks alike before the model is made "
            "(not by rank), and load weights on every rank, not on one"
        )


def _copies(tensors: RankTensors) -> dict[Copy, torch.Tensor]:
    plan, coordinates, full_tensors = tensors.plan, tensors.coordinates, tensors.full_tensors
    job = plan.job
    ranks = pipeline_ranks(plan)
    result: dict[Copy, torch.Tensor] = {}
    for k, kept in sorted(tensors.parameters.items()):
        parameter = job.parameters[k]
        name = parameter.tied_to
        shards, over = (parameter.shards, parameter.kept) if name not in full_tensors else ((), ())
        if _is_elsewhere(job, ranks[name], [*over, *(s.axis for s in shards if s.copies == 1)]):
            part = *(coordinates[axis] for axis in over), *(s.part(coordinates[s.axis]) for s in shards)
            result.setdefault((f"parameter {name!r}", part), full_tensors.get(name, kept))
    # An evaluation reads what a training wrote.
    for k, buffer_here in sorted(tensors.buffers.items()) if job.trains else ():
        buffer = job.buffers[k]
        if not buffer.updates and _is_elsewhere(job, set(map(plan.rank_of, buffer.stages)), ()):
            result[f"buffer {buffer.name!r}", ()] = buffer_here
    return result


def _is_elsewhere(job: Job, pp_ranks: set[int], sharded: Sequence[str]) -> bool:
    """Whether what these pipeline ranks use, and has parts over these axes, is on more than one rank."""
    return len(pp_ranks) > 1 or any(size > 1 and axis not in sharded for axis, size in job.axes)


def digest(tensor: torch.Tensor) -> str:
    """Step 2: equal for equal values, whatever their layout and device; no copy of the tensor is made,
    except where it is not contiguous.

    The words of a chunk are mixed with an odd number of their place and summed, modulo 2**64: sums of
    integers are the same in any order, and none stays as it was when one word changes.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))
    odd = 2 * torch.arange(min(CHUNK, len(words)), device=words.device) + 1
    placed = (chunk * odd[: len(chunk)] for chunk in torch.split(words, CHUNK))
    # Mixed each by itself, and no two alike: else minus a tensor of one number would have its digest.
    sums = torch.stack([((words ^ (words >> 31 & 2**33 - 1)) * MIX).sum() for words in placed])
    text = f"{tensor.dtype} {tuple(tensor.shape)} {sums.tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _difference(result: Sequence[Mapping[Copy, str]]) -> str:
    """Step 3: what differs, and where; "" if nothing does. found: by rank."""
    first: dict[Copy, tuple[int, str]] = {}
    apart: dict[Copy, list[int]] = {}
    for rank, digests in enumerate(result):
        for copy, text in digests.items():
            _, expected = first.setdefault(copy, (rank, text))
            if text != expected:
                apart.setdefault(copy, []).append(rank)
    if not apart:
        return ""
    copy, ranks = next(iter(apart.items()))
    others = len({what for what, _ in apart}) - 1
    more = f" (and {others} more)" if others else ""
    where = f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"
    return f"{copy[0]}{more} has other values on {where} than on rank {first[copy][0]}"
