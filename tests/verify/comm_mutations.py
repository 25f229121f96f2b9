"""Ways to break a plan in what it says of axes: collectives, shards, communicators, sums of gradients.

Each takes a plan and a source of chance, and gives a plan that must be refused, or None if the plan has no
place for it (no collective, for example).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES
from stretto.ir.plan import InstructionKind, Item, ItemKind, Plan
from stretto.ir.program import STARTS, WAIT, Arg, Op, Parameter, Ref, Shard, Stage, TensorSpec
from stretto.schedule.lower import lower
from stretto.schedule.sums import make_sums
from tests.verify.order_mutations import Mutation

Found = tuple[int, Phase, Op]
"""An op with its stage and phase."""


def _ops(plan: Plan, *targets: str) -> list[Found]:
    return [
        (stage.index, phase, op)
        for stage in plan.job.stages
        for phase in PHASES
        for op in stage.ops[phase]
        if op.target in targets
    ]


def _with_programs(plan: Plan, change: Callable[[int, Phase, Op], Op]) -> Plan:
    stages = tuple(
        Stage(s.index, {phase: tuple(change(s.index, phase, op) for op in s.ops[phase]) for phase in PHASES})
        for s in plan.job.stages
    )
    return replace(plan, job=replace(plan.job, stages=stages))


def _with_op(plan: Plan, found: Found, new: Op) -> Plan:
    at = (found[0], found[1], found[2].name)
    return _with_programs(plan, lambda s, phase, op: new if (s, phase, op.name) == at else op)


def _pick(chance: Random, plan: Plan, *targets: str) -> Found | None:
    found = _ops(plan, *targets)
    return chance.choice(found) if found else None


def _with_parameter(plan: Plan, at: int, new: Parameter) -> Plan:
    parameters = list(plan.job.parameters)
    parameters[at] = new
    return replace(plan, job=replace(plan.job, parameters=tuple(parameters)))


def _lowered_again(plan: Plan) -> Plan:
    windows, orders, communicators = lower(plan.job, plan.schedule)
    buckets = make_sums(plan.job, plan.schedule).buckets
    return replace(plan, windows=windows, orders=orders, communicators=communicators, buckets=buckets)


# Collectives of programs.


def wait_becomes_another_op(plan: Plan, chance: Random) -> Plan | None:
    """Nothing waits any more, and the op reads what is being filled."""
    found = _pick(chance, plan, WAIT)
    return found and _with_op(plan, found, replace(found[2], target="aten.alias.default"))


def read_before_wait(plan: Plan, chance: Random) -> Plan | None:
    """Every reader of a wait reads the start instead; the windows stand as they are."""
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    stage, _, wait = found

    def start(arg: Arg) -> Arg:
        return wait.args[0] if isinstance(arg, Ref) and arg.name == wait.name else arg

    changed = _with_programs(
        plan, lambda s, _, op: replace(op, args=tuple(map(start, op.args))) if s == stage else op
    )
    return changed if changed != plan else None


def wait_before_its_start(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    stage, phase, wait = found
    for window in plan.windows.values():
        for part, (of, parts) in enumerate(window.parts):
            if of == stage and phase in parts.parts:
                items = list(window.items)
                items.remove(Item(ItemKind.OP, part, wait.name))
                items.insert(
                    items.index(Item(ItemKind.OP, part, wait.args[0].name)),
                    Item(ItemKind.OP, part, wait.name),
                )
                return replace(
                    plan, windows={**plan.windows, window.name: replace(window, items=tuple(items))}
                )
    return None


def start_twice(plan: Plan, chance: Random) -> Plan | None:
    names = {op.name for _, _, op in _ops(plan, *STARTS)}
    places = [
        (window, at)
        for window in plan.windows.values()
        for at, i in enumerate(window.items)
        if i.ref in names
    ]
    if not places:
        return None
    window, at = chance.choice(places)
    items = (*window.items[:at], window.items[at], *window.items[at:])
    return replace(plan, windows={**plan.windows, window.name: replace(window, items=items)})


def second_wait(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    stage, phase, wait = found
    again = replace(wait, name=f"{wait.name}_again")
    programs = {**plan.job.stages[stage].ops}
    programs[phase] = (*programs[phase], again)
    stages = [Stage(stage, programs) if s.index == stage else s for s in plan.job.stages]
    return _lowered_again(replace(plan, job=replace(plan.job, stages=tuple(stages))))


def wait_for_something_else(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, WAIT)
    if found is None:
        return None
    others = [op.args[0] for _, _, op in _ops(plan, *STARTS) if op.name == found[2].args[0].name]
    return _with_op(plan, found, replace(found[2], args=(others[0],), alias=None))


def another_axis(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    *args, axis, size = found[2].args
    other = chance.choice([a for a in ("pp", "ep", "", 0) if a != axis])
    return _with_op(plan, found, replace(found[2], args=(*args, other, size)))


def another_size(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    *args, size = found[2].args
    return _with_op(
        plan, found, replace(found[2], args=(*args, chance.choice([0, 1, size + 1, size * 2, -1])))
    )


def another_reduction(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, "comm.all_reduce", "comm.reduce_scatter")
    if found is None:
        return None
    value, _, *group = found[2].args
    return _with_op(plan, found, replace(found[2], args=(value, chance.choice(["mean", "", 1]), *group)))


def another_kind(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    kinds = [kind for kind in (*STARTS, "comm.broadcast") if kind != found[2].target]
    return _with_op(plan, found, replace(found[2], target=chance.choice(kinds)))


def another_shape(plan: Plan, chance: Random) -> Plan | None:
    """Of the start and of its wait alike, so that they agree."""
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    stage, _, start = found
    spec = start.outputs[0]
    assert spec is not None
    other = chance.choice(
        [
            TensorSpec((*spec.shape, 2), spec.dtype),
            TensorSpec(spec.shape, "int8"),
            TensorSpec((7,), spec.dtype),
        ]
    )

    def changed(s: int, _: Phase, op: Op) -> Op:
        is_it = s == stage and start.name in (op.name, op.alias)
        return replace(op, outputs=(other,)) if is_it else op

    return _with_programs(plan, changed)


def axis_of_another_size(plan: Plan, chance: Random) -> Plan | None:
    """The mesh grows; programs and communicators stay as they were."""
    axes = [(axis, size * 2 if axis == "tp" else size) for axis, size in plan.job.axes]
    changed = replace(plan, job=replace(plan.job, axes=tuple(axes)))
    return changed if changed != plan else None


def gradient_of_a_start(plan: Plan, chance: Random) -> Plan | None:
    found = _pick(chance, plan, *STARTS)
    if found is None:
        return None
    stage, phase, start = found
    here = [at for at, p in enumerate(plan.job.parameters) if any(s == stage for s, *_ in p.grads)]
    at = chance.choice(here)
    grads = ((stage, phase, start.name),)
    return _with_parameter(plan, at, replace(plan.job.parameters[at], grads=grads))


# Shards.


def shard_of_nothing(plan: Plan, chance: Random) -> Plan | None:
    at = chance.randrange(len(plan.job.parameters))
    parameter = plan.job.parameters[at]
    axis = plan.job.axes[-1][0]
    shard = chance.choice(
        [Shard("ep", 0), Shard(axis, 5), Shard(axis, -1), Shard(axis, 0, 0), Shard(axis, 0, 7)]
    )
    return _with_parameter(plan, at, replace(parameter, shards=(shard,), partial=()))


def tied_but_spread_differently(plan: Plan, chance: Random) -> Plan | None:
    pairs = [at for at, p in enumerate(plan.job.parameters) if p.tied_to != p.name]
    if not pairs:
        return None
    at = chance.choice(pairs)
    parameter = plan.job.parameters[at]
    spec = TensorSpec((1, *parameter.spec.shape), parameter.spec.dtype)
    new = chance.choice(
        [replace(parameter, spec=spec), replace(parameter, shards=(Shard(plan.job.axes[0][0], 0),))]
    )
    return _with_parameter(plan, at, new) if new != parameter else None


def partial_forgotten(plan: Plan, chance: Random) -> Plan | None:
    """Lowered again, so that the plan is sound but for ranks that drift apart."""
    gone = tuple(replace(p, partial=()) for p in plan.job.parameters)
    if gone == plan.job.parameters:
        return None
    return _lowered_again(replace(plan, job=replace(plan.job, parameters=gone)))


def whole_taken_for_a_part(plan: Plan, chance: Random) -> Plan | None:
    """Lowered again: every rank has the whole gradient, and it is summed all the same."""
    if plan.job.size("tp") == 1 or any(p.partial for p in plan.job.parameters):
        return None
    more = tuple(p if p.shards else replace(p, partial=("tp",)) for p in plan.job.parameters)
    return _lowered_again(replace(plan, job=replace(plan.job, parameters=more)))


def partial_and_spread(plan: Plan, chance: Random) -> Plan | None:
    spread = [at for at, p in enumerate(plan.job.parameters) if p.shards and plan.job.size("tp") > 1]
    if not spread:
        return None
    at = chance.choice(spread)
    changed = _with_parameter(plan, at, replace(plan.job.parameters[at], partial=("tp",)))
    return _lowered_again(changed)


# Communicators and sums.


def communicator_along_another_axis(plan: Plan, chance: Random) -> Plan | None:
    at = chance.randrange(len(plan.communicators))
    found = list(plan.communicators)
    axes = [("pp",), *((axis,) for axis, _ in plan.job.axes), ("pp", "pp")]
    new = chance.choice([a for a in axes if a != found[at].axes])
    found[at] = replace(found[at], axes=new)
    return replace(plan, communicators=tuple(found))


def drop_bucket(plan: Plan, chance: Random) -> Plan | None:
    """It is forgotten by all that name it."""
    if not plan.buckets:
        return None
    gone = chance.choice(plan.buckets).name
    return replace(
        plan,
        buckets=tuple(b for b in plan.buckets if b.name != gone),
        orders=tuple(tuple(i for i in order if i.ref != gone) for order in plan.orders),
    )


def bucket_that_nobody_starts(plan: Plan, chance: Random) -> Plan | None:
    if not plan.buckets:
        return None
    return replace(plan, buckets=(*plan.buckets, replace(chance.choice(plan.buckets), name="more")))


def bucket_on_another_communicator(plan: Plan, chance: Random) -> Plan | None:
    if not plan.buckets:
        return None
    at = chance.randrange(len(plan.buckets))
    found = list(plan.buckets)
    others = [c.name for c in plan.communicators if c.name != found[at].communicator]
    if not others:
        return None
    found[at] = replace(found[at], communicator=chance.choice(others))
    return replace(plan, buckets=tuple(found))


def gradient_out_of_its_bucket(plan: Plan, chance: Random) -> Plan | None:
    if not plan.buckets:
        return None
    at = chance.randrange(len(plan.buckets))
    found = list(plan.buckets)
    gone = chance.choice(found[at].parameters)
    found[at] = replace(found[at], parameters=tuple(n for n in found[at].parameters if n != gone))
    return replace(plan, buckets=tuple(found))


def gradient_in_another_bucket_too(plan: Plan, chance: Random) -> Plan | None:
    """Summed twice, or where it is not held, or over an axis that it has nothing on."""
    if not plan.buckets:
        return None
    at = chance.randrange(len(plan.buckets))
    found = list(plan.buckets)
    name = chance.choice([p.tied_to for p in plan.job.parameters])
    found[at] = replace(found[at], parameters=(*found[at].parameters, name))
    # A gradient that two axes sum may be taken from one bucket of an axis to another of it.
    return replace(plan, buckets=tuple(found))


def next_sum_before_the_last_has_ended(plan: Plan, chance: Random) -> Plan | None:
    """`reduced` of one sum and `reduce` of a later one of the same gradient are exchanged."""
    for rank, order in enumerate(plan.orders):
        for at, first in enumerate(order):
            if first.kind is not InstructionKind.REDUCED:
                continue
            held = set(plan.bucket(str(first.ref)).parameters)
            for later in range(at + 1, len(order)):
                second = order[later]
                if second.kind is InstructionKind.REDUCE and held & set(
                    plan.bucket(str(second.ref)).parameters
                ):
                    changed = list(order)
                    changed[at], changed[later] = second, first
                    return replace(
                        plan, orders=(*plan.orders[:rank], tuple(changed), *plan.orders[rank + 1 :])
                    )
    return None


def sums_in_the_wrong_order(plan: Plan, chance: Random) -> Plan | None:
    """A gradient's two sums are exchanged whole: dp first, then ties or parts."""
    kinds = (InstructionKind.REDUCE, InstructionKind.REDUCED)
    for rank, order in enumerate(plan.orders):
        names = [str(i.ref) for i in order if i.kind is InstructionKind.REDUCE]
        for k, first in enumerate(names):
            for second in names[k + 1 :]:
                if set(plan.bucket(first).parameters) & set(plan.bucket(second).parameters):
                    other = {first: second, second: first}
                    changed = tuple(
                        replace(i, ref=other.get(str(i.ref), i.ref)) if i.kind in kinds else i for i in order
                    )
                    return replace(plan, orders=(*plan.orders[:rank], changed, *plan.orders[rank + 1 :]))
    return None


def cost_of_no_communicator(plan: Plan, chance: Random) -> Plan | None:
    costs = plan.costs
    if not costs.collectives:
        return None
    (name, kind), cost = chance.choice(list(costs.collectives.items()))
    new = chance.choice([("ep", kind), (name, "gather")])
    return replace(plan, costs=replace(costs, collectives={**costs.collectives, new: cost}))


COMM_MUTATIONS: tuple[Mutation, ...] = (
    wait_becomes_another_op,
    read_before_wait,
    wait_before_its_start,
    start_twice,
    second_wait,
    wait_for_something_else,
    another_axis,
    another_size,
    another_reduction,
    another_kind,
    another_shape,
    axis_of_another_size,
    gradient_of_a_start,
    shard_of_nothing,
    tied_but_spread_differently,
    partial_forgotten,
    whole_taken_for_a_part,
    partial_and_spread,
    communicator_along_another_axis,
    drop_bucket,
    bucket_that_nobody_starts,
    bucket_on_another_communicator,
    gradient_out_of_its_bucket,
    gradient_in_another_bucket_too,
    next_sum_before_the_last_has_ended,
    sums_in_the_wrong_order,
    cost_of_no_communicator,
)
"""Every way to break what a plan says of axes; the test runs each on many plans."""
