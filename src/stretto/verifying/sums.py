"""Proves that every gradient is summed over exactly what it must be, and each part of it counted once.

A pipeline rank sums a gradient that it has, in this order:

1. over each axis along which its ranks have parts of it (`Parameter.partial`), in any order of the axes;
2. over the pipeline ranks that have a copy (ties);
3. over dp, when there is more than one copy of the data.

A sum starts after the last op that adds to the gradient and after the sum before it has ended, for both
write to the same memory; it ends before the step does. It may start inside the window of that op, or in one
of sums alone. An op only says which gradients go together.

Groups along an axis are within one pipeline rank, whose ranks all walk the same order, so they start sums
alike. Sums of ties join places, and so does the loss: all pipeline ranks must start those that they share in
one order. Where collectives of several communicators cannot all be resident at once, as on a GPU, different
orders can block each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from stretto.ir.action import ONCE, Phase
from stretto.ir.axes import PIPELINE, Sums, sums_of
from stretto.ir.plan import LOSS, ItemKind, Plan
from stretto.ir.program import STEP_LOSS, WAIT, Op
from stretto.ir.transfers import tied_ranks
from stretto.schedule.sums import TIED, reduces_loss, reduction
from stretto.verifying.fault import Fault
from stretto.verifying.trace import Event, EventKind, last_runs, trace_of

TIES = PIPELINE
"""The axis along which copies of a tied gradient are summed."""

Position = tuple[int, int]
"""(instruction of a rank's order, item of its window), where something happens on a rank."""


def sum_faults(plan: Plan) -> list[Fault]:
    """Every fault of gradient reductions. References must be sound."""
    tied = tied_ranks(plan.job, plan.schedule.stage_ranks)
    result = list(_programs(plan, tied))
    for rank in range(plan.ranks):
        result += _in_place(plan, rank)
        result += _SumWalk(plan, rank, tied).faults()
    result += _one_order(plan)
    return result


def axis_of(plan: Plan, start: Op) -> str | None:
    """What the op sums over; None if its communicator is for something else."""
    if start.lane == LOSS or start.lane in dict(plan.job.axes):
        return start.lane
    return TIES if start.lane.startswith(TIED) else None


def _programs(plan: Plan, tied: dict[str, tuple[int, ...]]) -> Iterator[Fault]:
    """Starts and waits by themselves: each gradient once, of the right size, on a communicator for sums."""
    job = plan.job
    known = {parameter.tied_to: parameter for parameter in job.parameters}
    for stage in job.stages:
        rank, ops = plan.rank_of(stage.index), stage.ops.get(Phase.REDUCE_GRAD, ())
        if ops and plan.sums(rank) != ops:
            where, what = f"sums of stage {stage.index}", f"stage {stage.index} is not the first of its rank"
            yield Fault(rank, where, what, "Put all of a rank's into its first stage")
        starts = {op.name: op for op in ops if op.target != WAIT}
        waited = {op.uses[0] for op in ops if op.target == WAIT}
        for op in ops:
            if op.target == WAIT:
                if op.alias != op.uses[0] or op.outputs != starts[op.uses[0]].outputs:
                    what = "is something else than the sum that it waits for"
                    yield Fault(rank, op.name, what, "Give it that")
                continue
            axis, names = axis_of(plan, op), ", ".join(op.sums)
            if len(op.args[0]) > len(op.sums):
                yield Fault(rank, op.name, f"has a gradient twice: {names}", "Name each once")
            if op.name not in waited:
                yield Fault(rank, op.name, "no op waits for it", "Add one")
            if axis is None:
                which = ", ".join((*dict(job.axes), *(TIED + name for name in tied))) or "none"
                what = f"communicator {op.lane} joins no parts or copies of gradients"
                yield Fault(rank, op.name, what, f"Give it {which}")
                continue
            if axis == TIES and op.sums != (op.lane.removeprefix(TIED),):
                what = f"sums {names} on communicator {op.lane}, which joins the ranks that have "
                what += op.lane.removeprefix(TIED)
                yield Fault(
                    rank, op.name, what, "Give each tied gradient a sum and a communicator of its own"
                )
            if (axis == LOSS) != (op.sums == (STEP_LOSS,)) or (STEP_LOSS in op.sums and axis != LOSS):
                what = f"sums {names} on communicator {op.lane}"
                yield Fault(rank, op.name, what, f"Sum the loss, and it alone, on {LOSS}")
                continue
            size = math.prod(plan.mesh.size(axis) for axis in plan.communicator(op.lane).axes[1:])
            size *= len(plan.communicator(op.lane).ranks)
            want: tuple[object, ...] = (job.loss_spec,), STEP_LOSS, size
            dtypes = {known[name].grad_dtype for name in op.sums if axis != LOSS}
            if axis != LOSS:
                made = reduction(job, op.name, op.lane, size, [known[name] for name in op.sums])
                want = made.outputs, made.alias, size
            if len(dtypes) > 1 or (op.outputs, op.alias, op.args[-1]) != want:
                what = f"is not the sum of {names} over {size} ranks, in place where it is alone"
                yield Fault(rank, op.name, what, "Lower the plan again")


def _in_place(plan: Plan, rank: int) -> Iterator[Fault]:
    """What runs of sums name: ops alone, of this rank, once a step."""
    for instruction in plan.orders[rank]:
        window = plan.windows.get(str(instruction.ref))
        if window is None:
            continue
        for part, (stage, phase) in enumerate(window.parts):
            if phase is not Phase.REDUCE_GRAD:
                continue
            if plan.rank_of(stage) != rank:
                yield Fault(rank, str(instruction), f"runs sums of rank {plan.rank_of(stage)}", "Run its own")
            elif instruction.microbatches[part] != ONCE:
                yield Fault(rank, str(instruction), "binds sums to a microbatch", f"Bind them to {ONCE}")
            elif any(item.part == part and item.kind is not ItemKind.OP for item in window.items):
                yield Fault(rank, str(instruction), "has messages among sums", "Move them to an action")


class _SumWalk:
    """One walk over one rank's order, from sum to sum."""

    def __init__(self, plan: Plan, rank: int, tied: dict[str, tuple[int, ...]]) -> None:
        self.plan = plan
        self.rank = rank
        self.order = plan.orders[rank]
        self.left = _needed(plan, rank, tied)
        """Gradient -> what it is still to be summed over, in order."""
        self.last = _last_adds(plan, rank)
        self.done: dict[str, list[str]] = {name: [] for name in self.left}
        self.under_way: dict[str, str] = {}
        """Gradient -> the op that sums it now."""

    def faults(self) -> Iterator[Fault]:
        started: dict[str, int] = {}
        ended: set[str] = set()
        for event in trace_of(self.plan, self.rank):
            if event.op is None:
                continue
            name = event.op.name
            if event.kind is EventKind.REDUCE:
                if name in started:
                    yield self.fault(
                        event, f"starts a second time; instruction {started[name]} did", "Keep one"
                    )
                    continue
                started[name] = event.at
                yield from self.start(event, event.op)
            elif name not in started:
                yield self.fault(
                    event, f"waits for {name}, which does not start before it", f"Move it after {name}"
                )
            elif name in ended:
                yield self.fault(event, "is waited for twice", "Keep one")
            else:
                ended.add(name)
                self.under_way = {g: b for g, b in self.under_way.items() if b != name}
        for op in self.plan.sums(self.rank):
            if op.target != WAIT and op.name not in started:
                yield Fault(self.rank, op.name, "never starts", "Add it to a window, or remove it")
            elif op.target == WAIT and op.uses[0] in started and op.uses[0] not in ended:
                what = "missing; the step could end before the sum is there"
                yield Fault(self.rank, op.name, what, f"Add it after {op.uses[0]}")
        for gradient, axes in self.left.items():
            if axes:
                yield self.never(gradient, axes)

    def start(self, event: Event, op: Op) -> Iterator[Fault]:
        """Every gradient of the sum is complete so far, at rest, and next to be summed over this axis."""
        axis = axis_of(self.plan, op)
        early: dict[Position, str] = {}
        for gradient in op.sums:
            if gradient not in self.left:
                yield self.fault(
                    event,
                    f"sums {gradient}, of which this rank has no gradient",
                    f"Take {gradient} out of it",
                )
                continue
            if gradient in self.under_way:
                other = self.under_way[gradient]
                what = f"starts while {other} still sums {gradient}"
                yield self.fault(event, what, f"Move it after the wait for {other}")
            if axis is not None:
                yield from self.take(event, gradient, axis)
            self.under_way[gradient] = op.name
            last = self.last.get(gradient)
            if last is not None and last > (event.at, event.item):
                early.setdefault(last, gradient)
        if early:
            last = max(early)
            adds, item = self.order[last[0]], ""
            if last[0] == event.at:
                item = str(self.plan.windows[str(adds.ref)].items[last[1]])
            yield self.fault(
                event,
                f"starts before `{item or adds}` has added its part of "
                + ("the loss" if early[last] == STEP_LOSS else f"the gradient of {early[last]}"),
                f"Move it after item {last[1]}" if item else f"Move it after instruction {last[0]}",
            )

    def take(self, event: Event, gradient: str, axis: str) -> Iterator[Fault]:
        """The gradient's next sum is over `axis`; partial axes come before all else, in any order."""
        left = self.left[gradient]
        if axis not in left:
            again = axis in self.done[gradient]
            yield self.fault(
                event,
                f"sums {gradient} over {axis} "
                + ("a second time" if again else "though it has no parts or copies there"),
                f"Take {gradient} out of it",
            )
            return
        before = left[: left.index(axis)] if sums_of(axis) is not Sums.PARTIAL else []
        if before:
            yield self.fault(
                event,
                f"sums {gradient} over {_said(axis)} before its sum over {_said(before[0])}",
                "Move it after the wait for that sum",
            )
        left.remove(axis)
        self.done[gradient].append(axis)

    def never(self, gradient: str, axes: list[str]) -> Fault:
        lane = TIED + gradient if axes[0] == TIES else axes[0]
        if gradient == STEP_LOSS:
            return Fault(self.rank, "loss", "is never summed; other ranks would wait", "Add its sum")
        return Fault(
            self.rank,
            f"gradient of {gradient}",
            f"is never summed over {' and '.join(map(_said, axes))}",
            f"Add a sum on communicator {lane} that has it",
        )

    def fault(self, event: Event, what: str, fix: str) -> Fault:
        window = self.plan.windows[str(event.instruction.ref)]
        return Fault(self.rank, f"window {window.name}, {window.items[event.item].ref}", what, fix)


def _said(axis: str) -> str:
    return "the ranks that have a copy" if axis == TIES else axis


def _needed(plan: Plan, rank: int, tied: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Tied groups that the rank has and that have a gradient -> what it is to be summed over, in order. And
    the loss."""
    trained = {parameter.tied_to for parameter in plan.job.parameters if parameter.grads}
    result: dict[str, list[str]] = {}
    sharded = {p.tied_to: {shard.axis for shard in p.shards} for p in plan.job.parameters}
    for parameter in plan.job.parameters:
        if parameter.tied_to in trained and any(plan.rank_of(s) == rank for s in parameter.stages):
            axes = result.setdefault(parameter.tied_to, [])
            axes += [axis for axis in parameter.partial if axis not in axes]
    for name, axes in result.items():
        if rank in tied.get(name, ()):
            axes.append(TIES)
        axes += [axis for axis in plan.job.data_axes if axis not in axes and axis not in sharded[name]]
    return result | ({STEP_LOSS: [LOSS]} if reduces_loss(plan.job, plan.ranks) else {})


def _last_adds(plan: Plan, rank: int) -> dict[str, Position]:
    """Tied group, or the loss -> the rank's last run that adds to it, and the last item there that does."""
    last = last_runs(plan, rank)
    result: dict[str, Position] = {}
    partial_sums = [(p.tied_to, *grad) for p in plan.job.parameters for grad in p.grads]
    partial_sums.append((STEP_LOSS, plan.job.loss[0], Phase.F, plan.job.loss[1]))
    for name, stage, phase, value in partial_sums:
        at = last.get((stage, phase), -1)
        if at >= 0:
            window = plan.windows[str(plan.orders[rank][at].ref)]
            parts = [k for k, (s, runs) in enumerate(window.parts) if s == stage and phase in runs.programs]
            adds = [
                k
                for k, item in enumerate(window.items)
                if item.kind is ItemKind.OP and item.ref == value and item.part in parts
            ]
            # An op that is missing is a fault of the window.
            pp_rank = (at, max(adds, default=0))
            result[name] = max(result.get(name, pp_rank), pp_rank)
    return result


def _one_order(plan: Plan) -> Iterator[Fault]:
    """Ranks start what joins them in one order: sums of ties, and that of the loss."""
    joined = {result.name: result.ranks for result in plan.communicators if result.joins_pp_ranks}
    starts = [_first_starts(plan, rank) for rank in range(plan.ranks)]
    for first in range(plan.ranks):
        for second in range(first + 1, plan.ranks):
            both = starts[first].keys() & starts[second].keys() & joined.keys()
            shared = {lane for lane in both if {first, second} <= {*joined[lane]}}
            here, there = ([lane for lane in starts[rank] if lane in shared] for rank in (first, second))
            if here != there:
                a, b = next((a, b) for a, b in zip(here, there, strict=True) if a != b)
                yield Fault(
                    second,
                    f"window {starts[second][b]}, sum on {b}",
                    f"starts before that on {a}, but rank {first}, window {starts[first][a]}, starts {a} "
                    f"first: the order here is {', '.join(there)}, that of rank {first} is "
                    f"{', '.join(here)}",
                    "Start sums of tied gradients, and of the loss, in the same order on all ranks",
                )


def _first_starts(plan: Plan, rank: int) -> dict[str, str]:
    """Communicator of a sum -> the window in which the rank starts the first on it, in this order."""
    result: dict[str, str] = {}
    for event in trace_of(plan, rank):
        if event.kind is EventKind.REDUCE and event.op is not None:
            result.setdefault(event.op.lane, str(event.instruction.ref))
    return result
