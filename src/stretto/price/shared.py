"""What all prices share: which collectives a job has, at which sizes; rings; who shares a network card.

A ring of n over equal links has n - 1 empty messages in turn to gather or to scatter, each moving (n - 1) /
n of the tensor; twice that to reduce (Patarasuk and Yuan 2009); an exchange sends one part to each in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from stretto.ir.axes import PIPELINE
from stretto.ir.collectives import KINDS
from stretto.ir.costs import CollectiveCost, Link
from stretto.ir.curve import Curve
from stretto.ir.plan import LOSS
from stretto.ir.program import DTYPE_BYTES, GETITEM, WAIT, Job
from stretto.ir.program import FREE as FREES
from stretto.ir.transfers import message_us
from stretto.schedule.once import has_once, placed, with_once

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
    """All (axis, kind) of the jobs' axes larger than 1, in an order that is equal on all ranks: of what
    microbatches and steps communicate, as if each stage were on a rank of its own."""
    sizes: dict[tuple[str, str], set[int]] = defaultdict(set)
    dtypes: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for job in jobs:
        full = job if has_once(job) else with_once(job, placed(job, range(len(job.stages))))
        for _, op in full.all_ops:
            asked = op.collective
            if asked is not None:
                of_loss = op.lane == LOSS
                for axis in job.data_axes if of_loss else (op.lane,):
                    if job.size(axis) > 1:
                        sizes[axis, asked.kind].add(SMALL_BYTES if of_loss else asked.nbytes)
                        dtypes[axis, asked.kind][op.made.dtype] += asked.nbytes
    return tuple(
        WantedCollective(axis, kind, sweep(sizes[axis, kind]), dtypes[axis, kind].most_common(1)[0][0])
        for axis, kind in sorted(sizes)
    )


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
