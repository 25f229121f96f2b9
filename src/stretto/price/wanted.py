"""Which collectives a job's step has, by axis and kind: what is worth measuring, and at which sizes.

Reads programs and parameters only. Which gradients are summed together lowering decides; here
they count as a gradient alone and as all gradients of a stage together, between which every sum lies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from stretto.ir.axes import Sums, sums_of
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.program import DTYPE_BYTES, Job
from stretto.ir.transfers import summed_bytes

SMALL_BYTES = 4096
"""A size that shows the latency. Assumed: a page."""

MOST_SIZES = 6
"""Sizes that the ops themselves ask for, before neighbours; more are thinned out evenly."""


@dataclass(frozen=True, slots=True)
class WantedCollective:
    """Collectives of one kind on one axis. sizes: bytes of the whole tensor, most important first; dtype: of
    most of their bytes."""

    axis: str
    kind: str
    sizes: tuple[int, ...]
    dtype: str


def wanted_collectives(*jobs: Job) -> tuple[WantedCollective, ...]:
    """All (axis, kind) of the jobs' axes larger than 1, in an order that is equal on all ranks."""
    sizes: dict[tuple[str, str], set[int]] = defaultdict(set)
    dtypes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for job in jobs:
        _ask(job, sizes, dtypes)
    return tuple(
        WantedCollective(axis, kind, sweep(sizes[axis, kind]), dtypes[axis, kind].most_common(1)[0][0])
        for axis, kind in sorted(sizes)
    )


def _ask(
    job: Job, sizes: dict[tuple[str, str], set[int]], dtypes: dict[tuple[str, str], Counter[str]]
) -> None:
    """What one job asks for, added to what others do."""
    for stage in job.stages:
        for ops in stage.ops.values():
            for op in ops:
                asked = op.collective
                made = op.outputs[0] if op.outputs else None
                if asked is not None and made is not None and job.size(asked.axis) > 1:
                    sizes[asked.axis, asked.kind].add(asked.nbytes)
                    dtypes[asked.axis, asked.kind][made.dtype] += asked.nbytes
    for axis, size in job.axes:
        if size == 1:
            continue
        for stage in job.stages:
            summed = [
                parameter
                for parameter in job.parameters
                if stage.index in parameter.stages
                and parameter.grads
                and (sums_of(axis) is Sums.ALL or axis in parameter.partial)
            ]
            if summed:
                each = [summed_bytes(job, parameter, axis) for parameter in summed]
                sizes[axis, ALL_REDUCE.name].update((min(each), max(each), sum(each)))
                for parameter, nbytes in zip(summed, each, strict=True):
                    dtype = parameter.own_dtype or parameter.spec.dtype
                    dtypes[axis, ALL_REDUCE.name][dtype] += nbytes


def sweep(asked: Iterable[int]) -> tuple[int, ...]:
    """The sizes asked for, then a small one, half the smallest and twice the largest."""
    exact = sorted(set(asked))
    if len(exact) > MOST_SIZES:
        step = (len(exact) - 1) / (MOST_SIZES - 1)
        exact = sorted({exact[round(k * step)] for k in range(MOST_SIZES)})
    around = (SMALL_BYTES, exact[0] // 2, exact[-1] * 2)
    return (*exact, *(size for size in dict.fromkeys(around) if size >= SMALL_BYTES and size not in exact))


def elements(nbytes: int, dtype: str, members: int) -> int:
    """Elements of a tensor of about `nbytes` that `members` can split evenly; at least one each."""
    return max(1, round(nbytes / DTYPE_BYTES[dtype] / members)) * members
