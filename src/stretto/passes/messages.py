"""Messages between stages: in one piece of memory, sent once to a rank, and handed on by who has them.

`dense_messages`: what leaves a rank is in one piece, so that no message waits for a copy that no one priced.
A transport sends one piece. A transposed value is one, with its dims in another order; an expanded one
repeats elements that need not be sent; a slice has gaps, and must be copied. Left to the transport, the copy
is made by the thread that computes, where the message starts, and no price list knows it. So:

    1. Take the values that go to a stage of another rank and are not contiguous.
    2. The sender makes of each, right after it, what is sent: of an expanded dim one slice, and the dims in
       the order in which they are in memory, both views; and a copy if there are gaps still. The copy is an
       op like any other: it has a price, and orders of ops count it.
    3. The receiver puts the dims back in their places, and expands, by views: what reads the value finds it
       with its dims in the same order in memory, without gaps.
    4. A stage that reads a value by strides of its own (`as_strided`) gets it in the same places of memory.
       One with gaps between its elements, which are not sent, is refused.
    5. What a collective reads is copied by an op before it likewise; one that works in place makes a copy in
       any case, which its start's price has.

As captured, the stage that makes a value sends it to every stage that reads it: an encoder's output that all
decoder stages read leaves one rank as often as there are such stages. A stage has a value by then if it reads
it in the phase in which it was made, and comes before in that phase.

    sent_once   Of the stages of one rank that read a value, those behind the first take it from that one.
    handed_on   Every stage takes it from the nearest stage that has it by then: that from which a message
                takes least, and of equal ones the one that got it last. Planning tries a step with and
                without: it relieves the sender's card, and is late where a stage that hands on is late.

No number changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from stretto.errors import PlanError
from stretto.ir.action import Phase
from stretto.ir.prices import specs_of
from stretto.ir.program import Arg, Const, Edge, Job, Op, Ref, Stage, TensorSpec
from stretto.ir.transfers import message_us
from stretto.passes.rewrite import changed, dense_strides, read_as, restrided, spec_with, stage_of, strides_of
from stretto.passes.step import Context, Step

COPY = "aten.clone.default"
CONTIGUOUS = (("memory_format", Const("memory_format", "contiguous_format")),)


_Call = tuple[str, tuple[Arg, ...], TensorSpec]
"""A view of a value, or the copy: target, arguments behind the first, what it makes."""


def dense_messages(step: Step, context: Context) -> Step:
    """The step in which messages are contiguous; the step itself where they are."""
    ranks = step.schedule.stage_ranks
    job = step.job
    strided = [
        edge for edge in job.edges if _is_strided(edge.spec) and ranks[edge.source] != ranks[edge.target]
    ]
    faults = [
        f"stage {edge.target} reads {edge.value} of stage {edge.source} by strides of its own (as_strided), "
        "and there are gaps between its elements, which are not sent: make it contiguous, or split elsewhere"
        for edge in strided
        if _by_strides(job.stages[edge.target], edge.value)
        and any(target == COPY for target, _, _ in _calls(edge.spec)[0])
    ]
    if faults:
        raise PlanError("values that cannot be sent from rank to rank", faults)
    if strided:
        job = _dense(job, strided)
    job = _dense_collectives(job)
    return step if job is step.job else replace(step, job=job)


def _is_strided(spec: TensorSpec) -> bool:
    return spec.stride is not None and spec.numel > 0


def _copies(op: Op, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a start reads what is not in one piece, and makes no copy of it."""
    if op.kind is None or op.kind.in_place or not isinstance(op.args[0], Ref):
        return False
    spec = specs.get(op.args[0].name)
    return spec is not None and _is_strided(spec)


def _dense_collectives(job: Job) -> Job:
    """Step 5."""
    specs = specs_of(job)
    if not any(_copies(op, specs) for _, op in job.all_ops):
        return job

    def dense(op: Op) -> tuple[Op, ...]:
        if not _copies(op, specs):
            return (op,)
        value = op.args[0].name
        spec = replace(specs[value], stride=None)
        copy = Op(f"{op.name}_dense", COPY, (Ref(value),), CONTIGUOUS, (spec,), module=op.module)
        return copy, replace(op, args=(Ref(copy.name), *op.args[1:]))

    return replace(job, stages=tuple(changed(stage, dense) for stage in job.stages))


def _by_strides(stage: Stage, value: str) -> bool:
    """Whether step 4 is about the stage and a value that it is sent."""
    return any(
        op.target.startswith("aten.as_strided") and (op.alias == value or value in op.uses)
        for op in stage.all_ops
    )


def _dense(job: Job, strided: Sequence[Edge]) -> Job:
    """Steps 2 and 3."""
    programs = {stage.index: dict(stage.ops) for stage in job.stages}
    carried = list(job.edges)
    sent: set[str] = set()
    for edge in strided:
        there, back = _calls(edge.spec)
        name = f"{edge.value}_sent"
        if edge.value not in sent:
            sent.add(edge.value)
            of = programs[edge.source]
            of[edge.phase] = tuple(
                new
                for op in of[edge.phase]
                for new in (op, *(_ops(there, op.name, name, op.module) if op.name == edge.value else ()))
            )
        here = f"{edge.value}_at_{edge.target}" if back else name
        read_as(programs[edge.target], edge, here, partial(_ops, back, name, here))
        of = programs[edge.target]
        specs: dict[str, TensorSpec | None] = {here: (back or there)[-1][2]}
        of |= {phase: tuple(restrided(ops, specs)) for phase, ops in of.items()}
        carried[edge.index] = replace(edge, value=name, spec=there[-1][2])
    touched = {stage for edge in strided for stage in (edge.source, edge.target)}
    stages = tuple(stage_of(s.index, programs[s.index]) if s.index in touched else s for s in job.stages)
    return replace(job, stages=stages, edges=tuple(carried))


def _calls(spec: TensorSpec) -> tuple[list[_Call], list[_Call]]:
    """What a sender makes of a value, and what a receiver makes of that."""
    there: list[_Call] = []
    back: list[_Call] = []
    shape, strides, dims = list(spec.shape), list(strides_of(spec)), range(len(spec.shape))
    expanded = [dim for dim in dims if strides[dim] == 0 and shape[dim] > 1]
    for dim in expanded:
        shape[dim] = 1
        there.append(("aten.slice.Tensor", (dim, 0, 1), spec_with(shape, spec.dtype, strides)))
    made = spec_with(shape, spec.dtype, strides)
    order = sorted(dims, key=lambda dim: -strides[dim])
    if made.stride is not None and order != list(dims):
        made = spec_with([shape[dim] for dim in order], spec.dtype, [strides[dim] for dim in order])
        there.append(("aten.permute.default", (tuple(order),), made))
        dense, places = dense_strides(made.shape), [order.index(dim) for dim in dims]
        result = spec_with(shape, spec.dtype, [dense[place] for place in places])
        back.append(("aten.permute.default", (tuple(places),), result))
    if made.stride is not None:
        there.append((COPY, (), replace(made, stride=None)))
    if expanded:
        result = (back or there)[-1][2]
        kept = [0 if dim in expanded else stride for dim, stride in enumerate(strides_of(result))]
        back.append(("aten.expand.default", (spec.shape,), spec_with(spec.shape, spec.dtype, kept)))
    return there, back


def _ops(calls: Sequence[_Call], value: str, name: str, module: str) -> list[Op]:
    """The calls as ops, one of the other's result, of which the last makes `name`."""
    result: list[Op] = []
    for at, (target, args, spec) in enumerate(calls):
        made = name if at == len(calls) - 1 else f"{name}_{at}"
        kwargs, alias = (CONTIGUOUS, None) if target == COPY else ((), value)
        result.append(Op(made, target, (Ref(value), *args), kwargs, (spec,), alias, module=module))
        value = made
    return result


SAME = "aten.alias.default"


def sent_once(step: Step, context: Context) -> Step:
    """The step in which no rank is sent a value twice; the step itself where none is."""
    ranks = step.schedule.stage_ranks
    result: dict[int, Edge] = {}
    for edge, owners in _later_readers(step.job):
        here = [owner for owner in owners if ranks[owner.target] == ranks[edge.target]]
        if here and ranks[edge.source] != ranks[edge.target]:
            result[edge.index] = here[0]
    return replace(step, job=_through(step.job, result)) if result else step


def handed_on(step: Step, context: Context) -> Step:
    """The step in which values are handed on by the nearest; the step itself where none can be."""
    ranks = step.schedule.stage_ranks
    costs = context.costs_of(step.job)

    def us(sender: int, edge: Edge) -> float:
        return message_us(costs.link(ranks[sender], ranks[edge.target]), edge.spec.nbytes)

    result: dict[int, Edge] = {}
    for edge, owners in _later_readers(step.job):
        others = [owner for owner in owners if ranks[owner.target] != ranks[edge.target]]
        if ranks[edge.source] == ranks[edge.target] or len(others) < len(owners) or not others:
            continue
        nearest = min(reversed(others), key=lambda owner: us(owner.target, edge))
        if us(nearest.target, edge) <= us(edge.source, edge):
            result[edge.index] = nearest
    return replace(step, job=_through(step.job, result)) if result else step


def _later_readers(job: Job) -> Iterator[tuple[Edge, list[Edge]]]:
    """Edges of values that stages before their target have by then, with the edges of these, in order."""
    of_value: dict[tuple[str, int], list[Edge]] = defaultdict(list)
    for edge in job.edges:
        of_value[edge.value, edge.source].append(edge)
    for edges in of_value.values():
        backward = edges[0].phase is not Phase.F
        edges.sort(key=lambda edge: -edge.target if backward else edge.target)
        for at, edge in enumerate(edges):
            owners = [one for one in edges[:at] if one.user_phase is edge.phase]
            if owners:
                yield edge, owners


def _through(job: Job, owners: dict[int, Edge]) -> Job:
    """The job in which the edges of these indexes come from the stage that each one's owner leads to. There
    the value gets a name of its own, as one that the stage makes."""
    programs = {stage.index: dict(stage.ops) for stage in job.stages}
    carried = list(job.edges)
    named: set[str] = set()
    for index, owner in owners.items():
        edge, stage = job.edges[index], owner.target
        name = f"{edge.value}_from_{stage}"
        if name not in named:
            named.add(name)
            ops = programs[stage][edge.phase]
            # The value may have another name here by now: its own owner's.
            value = carried[owner.index].value
            first = next(at for at, op in enumerate(ops) if value in op.uses)
            same = Op(name, SAME, (Ref(value),), (), (edge.spec,), value, module=ops[first].module)
            programs[stage][edge.phase] = (*ops[:first], same, *ops[first:])
        read_as(programs[edge.target], edge, name, lambda module: ())
        carried[index] = replace(edge, value=name, source=stage)
    stages = tuple(stage_of(stage.index, programs[stage.index]) for stage in job.stages)
    return replace(job, stages=stages, edges=tuple(carried))
