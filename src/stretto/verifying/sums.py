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
from collections import defaultdict
from collections.abc import Iterator, Mapping

from stretto.ir.action import ONCE, Phase
from stretto.ir.axes import PIPELINE, Sums, sums_of
from stretto.ir.plan import LOSS, ItemKind, Plan
from stretto.ir.program import STEP_LOSS, WAIT, Op, Parameter
from stretto.ir.transfers import tied_ranks
from stretto.schedule.sums import TIED, reduces_loss, reduction
from stretto.verifying.fault import Fault
from stretto.verifying.trace import Event, EventKind, trace_of

TIES = PIPELINE
"""The axis along which copies of a tied gradient are summed."""

Position = tuple[int, int]
"""(instruction of a rank's order, item of its window), where something happens on a rank."""

Wrong = Iterator[tuple[str, str]]
"""What is wrong, and what to do about it."""


def sum_faults(plan: Plan) -> list[Fault]:
    """Every fault of gradient reductions. References must be sound."""
    tied = tied_ranks(plan.job, plan.schedule.stage_ranks)
    result = list(_programs(plan))
    for rank in range(plan.ranks):
        result += _in_place(plan, rank)
        result += _in_order(plan, rank, tied)
    result += _one_order(plan)
    return result


def _programs(plan: Plan) -> Iterator[Fault]:
    """Starts and waits by themselves: each gradient once, of the right size, on a communicator for sums."""
    known = {parameter.tied_to: parameter for parameter in plan.job.parameters}
    for stage in plan.job.stages:
        rank, ops = plan.rank_of(stage.index), stage.ops.get(Phase.REDUCE_GRAD, ())
        if ops and plan.sums(rank) != ops:
            where, what = f"sums of stage {stage.index}", f"stage {stage.index} is not the first of its rank"
            yield Fault(rank, where, what, "Put all of a rank's into its first stage")
        made = {op.name: op.outputs for op in ops}
        waited = {op.uses[0] for op in ops if op.target == WAIT}
        for op in ops:
            if op.target != WAIT:
                yield from (Fault(rank, op.name, *wrong) for wrong in _start(plan, op, known))
                if op.name not in waited:
                    yield Fault(rank, op.name, "no op waits for it", "Add one")
            elif (op.alias, op.outputs) != (op.uses[0], made[op.uses[0]]):
                what = "is something else than the sum that it waits for"
                yield Fault(rank, op.name, what, "Give it that")


def _start(plan: Plan, op: Op, known: Mapping[str, Parameter]) -> Wrong:
    job, names = plan.job, ", ".join(op.sums)
    if len(op.args[0]) > len(op.sums):
        yield f"has a gradient twice: {names}", "Name each once"
    # The loss, and each tied gradient, has a communicator of its own.
    own = STEP_LOSS if op.lane == LOSS else op.lane.removeprefix(TIED) if op.lane.startswith(TIED) else None
    fits = op.sums == (own,) if own is not None else STEP_LOSS not in op.sums and op.lane in dict(job.axes)
    if not fits:
        fix = f"Sum the loss on {LOSS}, copies of a tied gradient on {TIED}<its name>, others on an axis"
        yield f"sums {names} on communicator {op.lane}, which is not for them", fix
        return
    communicator = plan.communicator(op.lane)
    size = math.prod((len(communicator.ranks), *map(plan.mesh.size, communicator.axes[1:])))
    want: tuple[object, ...] = (job.loss_spec,), STEP_LOSS, size
    kept = [known[name] for name in op.sums if name != STEP_LOSS]
    if kept:
        made = reduction(job, op.name, op.lane, size, kept)
        want = made.outputs, made.alias, size
    if len({one.grad_dtype for one in kept}) > 1 or (op.outputs, op.alias, op.args[-1]) != want:
        what = f"is not the sum of {names} over {size} ranks, in place where it is alone"
        yield what, "Lower the plan again"


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


def _in_order(plan: Plan, rank: int, tied: Mapping[str, tuple[int, ...]]) -> Iterator[Fault]:
    """On one rank: each sum starts and ends once; each gradient's follow what adds to it, and each other."""
    begun: dict[str, Event] = {}
    ended: dict[str, Event] = {}
    needed, last = _needed(plan, rank, tied), _last_adds(plan, rank)
    sums: dict[str, list[Op]] = {name: [] for name in needed}
    for event in trace_of(plan, rank):
        if event.op is None:
            continue
        name, starts = event.op.name, event.kind is EventKind.REDUCE
        if name in (begun if starts else ended):
            yield _fault(plan, event, "is there a second time", "Keep one")
        elif starts:
            begun[name] = event
            for gradient in event.op.sums:
                what = f"sums {gradient}, of which this rank has no gradient"
                if gradient not in sums:
                    yield _fault(plan, event, what, f"Take {gradient} out of it")
                else:
                    sums[gradient].append(event.op)
        elif name not in begun:
            yield _fault(plan, event, f"waits for {name}, which does not start before it", "Move it after it")
        else:
            ended[name] = event
    for op in plan.sums(rank):
        if op.target != WAIT and op.name not in begun:
            yield Fault(rank, op.name, "never starts", "Add it to a window, or remove it")
        elif op.target == WAIT and op.uses[0] in begun and op.uses[0] not in ended:
            what = "missing; the step could end before the sum is there"
            yield Fault(rank, op.name, what, f"Add it after {op.uses[0]}")
    for gradient, axes in needed.items():
        before, does = last.get(gradient, (-1, -1)), ""
        if before >= (0, 0):
            does = f"`{plan.orders[rank][before[0]]}` has added its part of {gradient}"
        for op in sums[gradient]:
            event, end = begun[op.name], ended.get(op.name)
            if (event.at, event.item) < before:
                yield _fault(plan, event, f"starts before {does}", "Move it after that")
            if end is not None and (end.at, end.item) > before:
                before, does = (end.at, end.item), f"the sum of {gradient} by {op.name} has ended"
            yield from (_fault(plan, event, *wrong) for wrong in _take(op, gradient, axes))
        if axes:
            over = " and ".join(map(_said, axes))
            where = "loss" if gradient == STEP_LOSS else f"gradient of {gradient}"
            yield Fault(rank, where, f"is never summed over {over}", "Add a sum that has it; others wait")


def _take(op: Op, gradient: str, left: list[str]) -> Wrong:
    """The gradient's next sum is this one's; partial axes come before all else, in any order. left: what it
    is to be summed over, from which this one's is taken."""
    axis = TIES if op.lane.startswith(TIED) else op.lane
    if axis not in left:
        what = f"sums {gradient} over {_said(axis)} a second time, or has no parts or copies there"
        yield what, f"Take {gradient} out of it"
        return
    before = left[: left.index(axis)] if sums_of(axis) is not Sums.PARTIAL else []
    if before:
        what = f"sums {gradient} over {_said(axis)} before its sum over {_said(before[0])}"
        yield what, "Move it after the wait for that sum"
    left.remove(axis)


def _fault(plan: Plan, event: Event, what: str, fix: str) -> Fault:
    window = plan.windows[str(event.instruction.ref)]
    return Fault(event.rank, f"window {window.name}, {window.items[event.item].ref}", what, fix)


def _said(axis: str) -> str:
    return "the ranks that have a copy" if axis == TIES else axis


def _needed(plan: Plan, rank: int, tied: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
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
    adding: dict[tuple[int, str | int], list[str]] = defaultdict(list)
    adding[plan.job.loss].append(STEP_LOSS)
    for parameter in plan.job.parameters:
        for stage, _, value in parameter.grads:
            adding[stage, value].append(parameter.tied_to)
    inside = {
        window.name: {
            name: at
            for at, item in enumerate(window.items)
            for name in adding.get((window.parts[item.part][0], item.ref), ())
        }
        for window in plan.windows.values()
    }
    result: dict[str, Position] = {}
    for at, run, _ in plan.runs(rank):
        result.update({name: (at, item) for name, item in inside[str(run.ref)].items()})
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
