"""Proves that every gradient is summed over exactly what it must be, and each part of it counted once.

A place of the pipeline sums a gradient that it holds, in this order:

1. over each axis along which its ranks have parts of it (`Parameter.partial`), in any order of the axes;
2. over the places that hold a copy (ties);
3. over dp, when there is more than one copy of the data.

A sum starts after the last op that adds to the gradient and after the sum before it has ended, for both
write to the same memory; it ends before the step does. It may start inside the window of that op, or between
runs. Buckets only say which gradients go together.

Groups along an axis lie within one place, whose ranks all walk the same order, so they start sums alike. Sums
of ties join places, and so does the loss: all places must start those that they share in one order. Where
collectives of several communicators cannot all be resident at once, as on a GPU, different orders can block
each other.

May touch `stretto.ir`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stretto.ir.axes import PIPELINE, Sums, sums_of
from stretto.ir.plan import Bucket, InstructionKind, ItemKind, Plan
from stretto.verify.communicators import TIED, tied_ranks
from stretto.verify.fault import Fault
from stretto.verify.trace import last_runs

TIES = PIPELINE
"""The axis along which copies of a tied gradient are summed."""

Position = tuple[int, int]
"""(instruction of a rank's order, item of its window), where something happens on a rank."""

THE_LOSS = "the loss"
"""What the loss is called among tied gradients; no parameter's name has a space."""


def sum_faults(plan: Plan) -> list[Fault]:
    """Every fault of buckets, `reduce` and `reduced`. References must be sound."""
    tied = tied_ranks(plan)
    found = list(_buckets(plan, tied))
    for rank in range(plan.ranks):
        found += _RankWalk(plan, rank, tied).faults()
    found += _one_order(plan, tied)
    return found


def axis_of(plan: Plan, bucket: Bucket) -> str | None:
    """What the bucket's gradients are summed over; None if its communicator is for something else."""
    if bucket.communicator.startswith(TIED):
        return TIES
    return bucket.communicator if bucket.communicator in dict(plan.job.axes) else None


def _buckets(plan: Plan, tied: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    """Buckets by themselves: something in them, each gradient once, on a communicator for sums."""
    reduced = {e.name for rank in range(plan.ranks) for e in _starts_and_waits(plan, rank) if e.starts}
    for bucket in plan.buckets:
        where = f"bucket {bucket.name}"
        axis = axis_of(plan, bucket)
        names = ", ".join(bucket.parameters)
        if not bucket.parameters:
            yield Fault(None, where, "sums nothing", "Remove it")
        elif len(set(bucket.parameters)) < len(bucket.parameters):
            yield Fault(None, where, f"holds a gradient twice: {names}", "Name each once")
        if axis is None:
            yield Fault(
                None,
                where,
                f"communicator {bucket.communicator} joins no parts or copies of gradients",
                f"Give it {', '.join((*dict(plan.job.axes), *(TIED + name for name in tied))) or 'none'}",
            )
        elif axis == TIES and bucket.parameters != (bucket.communicator.removeprefix(TIED),):
            yield Fault(
                None,
                where,
                f"sums {names} on communicator {bucket.communicator}, which joins the ranks that hold "
                f"{bucket.communicator.removeprefix(TIED)}",
                "Give each tied gradient a bucket and a communicator of its own",
            )
        if bucket.name not in reduced:
            yield Fault(None, where, "no rank ever starts it", "Add its `reduce` and `reduced`, or remove it")


@dataclass(frozen=True, slots=True)
class _Event:
    """A sum's start, or the wait for it. at: the instruction, and within a run the item; where: in words."""

    name: str
    starts: bool
    at: Position
    where: str


def _starts_and_waits(plan: Plan, rank: int) -> Iterator[_Event]:
    """The rank's sums in the order of its program."""
    for at, instruction in enumerate(plan.orders[rank]):
        name = str(instruction.ref)
        if instruction.kind is InstructionKind.RUN:
            for k, item in enumerate(plan.windows[name].items):
                if item.kind is ItemKind.REDUCE:
                    where = f"window {name}, {replace(item, part=0)}"
                    yield _Event(str(item.ref), True, (at, k), where)
        elif instruction.kind in (InstructionKind.REDUCE, InstructionKind.REDUCED):
            starts = instruction.kind is InstructionKind.REDUCE
            yield _Event(name, starts, (at, 0), str(instruction))


class _RankWalk:
    """One walk over one rank's order, from sum to sum."""

    def __init__(self, plan: Plan, rank: int, tied: dict[str, tuple[int, ...]]) -> None:
        self.plan = plan
        self.rank = rank
        self.order = plan.orders[rank]
        self.buckets = {bucket.name: bucket for bucket in plan.buckets}
        self.axes = {bucket.name: axis_of(plan, bucket) for bucket in plan.buckets}
        self.left = _needed(plan, rank, tied)
        """Gradient -> what it is still to be summed over, in order."""
        self.last = _last_adds(plan, rank)
        self.done: dict[str, list[str]] = {name: [] for name in self.left}
        self.under_way: dict[str, str] = {}
        """Gradient -> the bucket that sums it now."""

    def faults(self) -> Iterator[Fault]:
        started: dict[str, int] = {}
        ended: set[str] = set()
        for event in _starts_and_waits(self.plan, self.rank):
            name = event.name
            if event.starts:
                if name in started:
                    yield self.fault(
                        event, f"starts a second time; instruction {started[name]} did", "Keep one"
                    )
                    continue
                started[name] = event.at[0]
                yield from self.start(event, self.buckets[name])
            elif name not in started:
                yield self.fault(
                    event,
                    f"waits for `reduce {name}`, which does not stand before it",
                    f"Put `reduce {name}` before it",
                )
            elif name in ended:
                yield self.fault(event, "is waited for twice", "Keep one")
            else:
                ended.add(name)
                self.under_way = {g: b for g, b in self.under_way.items() if b != name}
        for name in started:
            if name not in ended:
                yield Fault(
                    self.rank,
                    f"reduced {name}",
                    "missing; the step could end before the sum is there",
                    f"Add it after `reduce {name}`",
                )
        for gradient, axes in self.left.items():
            if axes:
                yield self.never(gradient, axes)

    def start(self, event: _Event, bucket: Bucket) -> Iterator[Fault]:
        """Every gradient of the bucket is complete so far, at rest, and next to be summed over this axis."""
        axis = self.axes[bucket.name]
        early: dict[Position, str] = {}
        for gradient in dict.fromkeys(bucket.parameters):
            if gradient not in self.left:
                yield self.fault(
                    event,
                    f"sums {gradient}, of which this rank has no gradient",
                    f"Remove it, or take {gradient} out of bucket {bucket.name}",
                )
                continue
            if gradient in self.under_way:
                other = self.under_way[gradient]
                yield self.fault(
                    event,
                    f"starts while bucket {other} still sums {gradient}",
                    f"Move it after `reduced {other}`",
                )
            if axis is not None:
                yield from self.take(event, gradient, axis)
            self.under_way[gradient] = bucket.name
            last = self.last.get(gradient)
            if last is not None and last > event.at:
                early.setdefault(last, gradient)
        if early:
            last = max(early)
            adds, item = self.order[last[0]], ""
            if last[0] == event.at[0]:
                item = str(self.plan.windows[str(adds.ref)].items[last[1]])
            yield self.fault(
                event,
                f"starts before `{item or adds}` has added its part of the gradient"
                + (f" of {early[last]}" if early[last] != bucket.name else ""),
                f"Move it after item {last[1]}" if item else f"Move it after instruction {last[0]}",
            )

    def take(self, event: _Event, gradient: str, axis: str) -> Iterator[Fault]:
        """The gradient's next sum is over `axis`; partial axes come before all else, in any order."""
        left = self.left[gradient]
        if axis not in left:
            again = axis in self.done[gradient]
            yield self.fault(
                event,
                f"sums {gradient} over {axis} "
                + ("a second time" if again else "though it has no parts or copies there"),
                f"Remove it, or take {gradient} out of its bucket",
            )
            return
        before = left[: left.index(axis)] if sums_of(axis) is not Sums.PARTIAL else []
        if before:
            yield self.fault(
                event,
                f"sums {gradient} over {_said(axis)} before its sum over {_said(before[0])}",
                "Move it after the `reduced` of that sum",
            )
        left.remove(axis)
        self.done[gradient].append(axis)

    def never(self, gradient: str, axes: list[str]) -> Fault:
        lane = TIED + gradient if axes[0] == TIES else axes[0]
        return Fault(
            self.rank,
            f"gradient of {gradient}",
            f"is never summed over {' and '.join(map(_said, axes))}",
            f"Add `reduce` and `reduced` of a bucket on communicator {lane} that holds it",
        )

    def fault(self, event: _Event, what: str, fix: str) -> Fault:
        return Fault(self.rank, event.where, what, fix)


def _said(axis: str) -> str:
    return "the ranks that hold a copy" if axis == TIES else axis


def _needed(plan: Plan, rank: int, tied: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Tied groups that the rank holds and that have a gradient -> what it is to be summed over, in order."""
    trained = {parameter.tied_to for parameter in plan.job.parameters if parameter.grads}
    found: dict[str, list[str]] = {}
    spread = {p.tied_to: {shard.axis for shard in p.shards} for p in plan.job.parameters}
    for parameter in plan.job.parameters:
        if parameter.tied_to in trained and any(plan.rank_of(s) == rank for s in parameter.stages):
            axes = found.setdefault(parameter.tied_to, [])
            axes += [axis for axis in parameter.partial if axis not in axes]
    for name, axes in found.items():
        if rank in tied.get(name, ()):
            axes.append(TIES)
        axes += [axis for axis in plan.job.data_axes if axis not in axes and axis not in spread[name]]
    return found


def _last_adds(plan: Plan, rank: int) -> dict[str, Position]:
    """Tied group -> the rank's last run that adds to its gradient, and the last item there that does."""
    last = last_runs(plan, rank)
    found: dict[str, Position] = {}
    for parameter in plan.job.parameters:
        for stage, phase, value in parameter.grads:
            at = last.get((stage, phase), -1)
            if at >= 0:
                window = plan.windows[str(plan.orders[rank][at].ref)]
                parts = [
                    k
                    for k, (where, runs) in enumerate(window.parts)
                    if where == stage and phase in runs.parts
                ]
                adds = [
                    k
                    for k, item in enumerate(window.items)
                    if item.kind is ItemKind.OP and item.ref == value and item.part in parts
                ]
                # An op that is missing is a fault of the window.
                place = (at, max(adds, default=0))
                found[parameter.tied_to] = max(found.get(parameter.tied_to, place), place)
    return found


def _one_order(plan: Plan, tied: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    """Ranks that share several tied gradients start them in one order; the loss, which all share, as well."""
    named = {b.name: b.parameters[0] for b in plan.buckets if axis_of(plan, b) == TIES and b.parameters}
    starts: list[dict[str, tuple[Position, str]]] = [{} for _ in plan.orders]
    for rank, order in enumerate(plan.orders):
        for event in _starts_and_waits(plan, rank):
            if event.starts and event.name in named:
                starts[rank][named[event.name]] = event.at, f"reduce {named[event.name]}"
        for at, i in enumerate(order):
            if i.kind is InstructionKind.LOSS:
                starts[rank][THE_LOSS] = (at, 0), "loss"
    for first in range(plan.ranks):
        for second in range(first + 1, plan.ranks):
            shared = [THE_LOSS, *(n for n, ranks in tied.items() if first in ranks and second in ranks)]
            shared = [n for n in shared if n in starts[first] and n in starts[second]]
            here, there = (sorted(shared, key=starts[rank].__getitem__) for rank in (first, second))
            if here != there:
                a, b = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
                a_says, b_says = starts[second][a][1], starts[second][b][1]
                yield Fault(
                    second,
                    b_says,
                    f"starts before `{a_says}`, but rank {first} starts `{a_says}` first: the order "
                    f"here is {', '.join(there)}, that of rank {first} is {', '.join(here)}",
                    "Start tied gradients, and the loss among them, in the same order on all ranks",
                )
