"""What all prices share: which collectives a job has, at which sizes; rings; who shares a network card.

A ring of n over equal links has n - 1 empty messages in turn to gather or to scatter, each moving (n - 1) /
n of the tensor; twice that to reduce (Patarasuk and Yuan 2009); an exchange sends one part to each in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from stretto.ir.axes import PIPELINE, Sums, sums_of
from stretto.ir.collectives import ALL_GATHER, ALL_REDUCE, KINDS, REDUCE_SCATTER
from stretto.ir.costs import CollectiveCost, Link
from stretto.ir.curve import Curve
from stretto.ir.program import DTYPE_BYTES, GETITEM, WAIT, Job, Stage
from stretto.ir.program import FREE as FREES
from stretto.ir.transfers import message_us, reduced_bytes
from stretto.ir.updates import norm_spec, parts_over

ACTION_US = 8.0
"""Time of a window's run besides its ops: its call, its clock readings. Measured on a 2.6 GHz core."""

FREE = (GETITEM, WAIT, FREES)
"""Ops that take no time of their own: the tuple has paid, the communication has a lane of its own, and to
free is to forget."""


def ring_cost(link: Link, kind: str, members: int) -> CollectiveCost:
    """A collective as a ring of `members` over equal links."""
    part = KINDS[kind].moved(members)
    # A transport that needs more processor time than wire time moves no faster than the processor does.
    us_per_byte = part * max(1.0 / link.bytes_per_us, link.processor_us_per_mb / 1e6)
    latency_us = KINDS[kind].steps(members) * message_us(link, 0)
    span = 1_000_000.0
    return CollectiveCost(
        Curve(((0.0, latency_us), (span, latency_us + span * us_per_byte))),
        link.processor_us_per_mb * part,
        0.0,
        f"a ring of {members} over links: {link.source}",
    )


def scaled(cost: CollectiveCost, kind: str, members: int, wish: int) -> CollectiveCost:
    """The cost for `wish` members from that for `members`: latency goes with the kind's steps, and bytes with
    what each member sends (n - 1 and (n - 1) / n of a ring)."""
    if members == wish:
        return cost
    steps = KINDS[kind].steps(wish) / KINDS[kind].steps(members)
    part = KINDS[kind].moved(wish) / KINDS[kind].moved(members)
    latency = cost.curve.points[0][1]
    points = [(nbytes, latency * steps + (us - latency) * part) for nbytes, us in cost.curve.points]
    return replace(
        cost,
        curve=Curve(tuple(points)),
        processor_us_per_mb=cost.processor_us_per_mb * part,
        processor_us=cost.processor_us * steps,
        source=f"{cost.source}; scaled to {wish} ranks",
    )


def sharing(axes: Iterable[str], leaving: Collection[str], *, pipelined: bool) -> tuple[str, ...]:
    """Those of `axes` (other than pp) whose collectives share a network card with something. leaving: the
    axes whose groups span hosts, `pp` among them if messages do; pipelined: whether there are messages. One
    axis alone has the card to itself. With messages that stay inside a host nothing shares: cards carry all
    messages or none (`stretto.simulating.cards`)."""
    if pipelined and PIPELINE not in leaving:
        return ()
    result = tuple(axis for axis in axes if axis in leaving)
    return result if len(result) + pipelined > 1 else ()


SMALL_BYTES = 4096
"""A size that shows the latency. Assumed: a page."""

MOST_SIZES = 6
"""Sizes that the ops themselves ask for, before neighbours; more are thinned out evenly."""


@dataclass(frozen=True, slots=True)
class WantedCollective:
    """Collectives of one kind on one axis. sizes: bytes of the full tensor, most important first; dtype: of
    most of their bytes."""

    axis: str
    kind: str
    sizes: tuple[int, ...]
    dtype: str


def wanted_collectives(*jobs: Job) -> tuple[WantedCollective, ...]:
    """All (axis, kind) of the jobs' axes larger than 1, in an order that is equal on all ranks. Of gradients
    that are reduced, one alone and all of a stage together: every reduction is between."""
    sizes: dict[tuple[str, str], set[int]] = defaultdict(set)
    dtypes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for job in jobs:
        for _, op in job.all_ops:
            asked = op.collective
            made = op.outputs[0] if op.outputs else None
            if asked is not None and made is not None and job.size(asked.axis) > 1:
                sizes[asked.axis, asked.kind].add(asked.nbytes)
                dtypes[asked.axis, asked.kind][made.dtype] += asked.nbytes
        for stage in job.stages:
            for (axis, kind, dtype), each in _once_a_step(job, stage).items():
                sizes[axis, kind].update((min(each), max(each), sum(each)))
                dtypes[axis, kind][dtype] += sum(each)
    return tuple(
        WantedCollective(axis, kind, sweep(sizes[axis, kind]), dtypes[axis, kind].most_common(1)[0][0])
        for axis, kind in sorted(sizes)
    )


def _once_a_step(job: Job, stage: Stage) -> dict[tuple[str, str, str], list[int]]:
    """(axis, kind, dtype) -> bytes of what travels once a step of a stage's parameters and gradients, one by
    one."""
    result: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    here = [parameter for parameter in job.parameters if stage.index in parameter.stages]
    for axis, parameter in ((axis, p) for axis, size in job.axes if size > 1 for p in here):
        nbytes = reduced_bytes(job, parameter, axis)
        if axis in parameter.kept:
            result[axis, ALL_GATHER.name, parameter.spec.dtype].append(parameter.spec.nbytes)
        if not parameter.grads or not (sums_of(axis) is Sums.ALL or axis in parameter.partial):
            continue
        kind = REDUCE_SCATTER if axis in parameter.kept else ALL_REDUCE
        result[axis, kind.name, parameter.grad_dtype].append(nbytes)
    if job.clip_norm is not None:
        norm = norm_spec(job)
        for axis in sorted({axis for parameter in here for axis in parts_over(job, parameter)[0]}):
            result[axis, ALL_REDUCE.name, norm.dtype].append(norm.nbytes)
    for axis in job.data_axes:
        if any(axis in parameter.kept for parameter in job.parameters):
            result[axis, ALL_REDUCE.name, job.loss_spec.dtype].append(job.loss_spec.nbytes)
    return result


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
