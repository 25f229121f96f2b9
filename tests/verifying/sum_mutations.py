"""Ways to break what a plan says of shards, communicators along axes, and sums of gradients.

Each takes a plan and a source of chance, and gives a plan that must be refused, or None if the plan has no
place for it (no sum, for example).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from stretto.ir.action import ONCE, Phase
from stretto.ir.plan import InstructionKind, Item, Plan, Window
from stretto.ir.program import WAIT, Op, Ref, Shard, Stage, TensorSpec
from stretto.schedule.windows import adding_items
from tests.verifying.comm_mutations import lowered_again, with_parameter
from tests.verifying.edits import summing, with_sum
from tests.verifying.order_mutations import Mutation


def shard_of_nothing(plan: Plan, chance: Random) -> Plan | None:
    at = chance.randrange(len(plan.job.parameters))
    parameter = plan.job.parameters[at]
    axis = plan.job.axes[-1][0]
    shard = chance.choice(
        [Shard("ep", 0), Shard(axis, 5), Shard(axis, -1), Shard(axis, 0, 0), Shard(axis, 0, 7)]
    )
    return with_parameter(plan, at, replace(parameter, shards=(shard,), partial=()))


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
    return with_parameter(plan, at, new) if new != parameter else None


def partial_forgotten(plan: Plan, chance: Random) -> Plan | None:
    """Lowered again, so that the plan is sound but for ranks that drift apart."""
    gone = tuple(replace(p, partial=()) for p in plan.job.parameters)
    if gone == plan.job.parameters:
        return None
    return lowered_again(replace(plan, job=replace(plan.job, parameters=gone)))


def whole_taken_for_a_part(plan: Plan, chance: Random) -> Plan | None:
    """Lowered again: every rank has the whole gradient, and it is summed all the same."""
    if plan.job.size("tp") == 1 or any(p.partial for p in plan.job.parameters):
        return None
    more = tuple(p if p.shards else replace(p, partial=("tp",)) for p in plan.job.parameters)
    return lowered_again(replace(plan, job=replace(plan.job, parameters=more)))


def partial_and_spread(plan: Plan, chance: Random) -> Plan | None:
    spread = [at for at, p in enumerate(plan.job.parameters) if p.shards and plan.job.size("tp") > 1]
    if not spread:
        return None
    at = chance.choice(spread)
    changed = with_parameter(plan, at, replace(plan.job.parameters[at], partial=("tp",)))
    return lowered_again(changed)


def communicator_along_another_axis(plan: Plan, chance: Random) -> Plan | None:
    at = chance.randrange(len(plan.communicators))
    found = list(plan.communicators)
    axes = [("pp",), *((axis,) for axis, _ in plan.job.axes), ("pp", "pp")]
    new = chance.choice([a for a in axes if a != found[at].axes])
    found[at] = replace(found[at], axes=new)
    return replace(plan, communicators=tuple(found))


def _starts(plan: Plan) -> list[tuple[int, Op]]:
    """(rank, start of a sum of gradients)."""
    return [
        (rank, op) for rank in range(plan.ranks) for op in plan.sums(rank) if op.sums and op.lane != "loss"
    ]


def _with_program(plan: Plan, rank: int, ops: Sequence[Op]) -> Plan:
    stage = min(plan.schedule.stages_of(rank))
    stages = list(plan.job.stages)
    stages[stage] = Stage(stage, {**stages[stage].ops, Phase.REDUCE_GRAD: tuple(ops)})
    return replace(plan, job=replace(plan.job, stages=tuple(stages)))


def drop_sum(plan: Plan, chance: Random) -> Plan | None:
    """It is forgotten by all that name it."""
    if not _starts(plan):
        return None
    rank, gone = chance.choice(_starts(plan))
    names = (gone.name, f"{gone.name}.sum")
    stages = plan.schedule.stages_of(rank)
    left = _with_program(plan, rank, [op for op in plan.sums(rank) if op.name not in names])
    windows = {
        name: replace(window, items=tuple(i for i in window.items if i.ref not in names))
        for name, window in plan.windows.items()
        if any(stage in stages for stage, _ in window.parts)
    }
    return replace(left, windows={**plan.windows, **windows})


def sum_before_its_last_addend(plan: Plan, chance: Random) -> Plan | None:
    """Inside the window that completes the gradient, the sum starts too early."""
    found = _sums_inside(plan)
    if not found:
        return None
    window, at = chance.choice(found)
    groups = next(op.sums for _, op in _starts(plan) if op.name == window.items[at].ref)
    added = [k for group in groups for k in adding_items(plan.job, window).get(group, ())]
    items = list(window.items)
    items.insert(chance.randint(0, max(added)), items.pop(at))
    return _with_items(plan, window, items)


def sum_in_a_window_left_out(plan: Plan, chance: Random) -> Plan | None:
    found = _sums_inside(plan)
    if not found:
        return None
    window, at = chance.choice(found)
    return _with_items(plan, window, [item for k, item in enumerate(window.items) if k != at])


def sum_in_a_window_doubled(plan: Plan, chance: Random) -> Plan | None:
    found = _sums_inside(plan)
    if not found:
        return None
    window, at = chance.choice(found)
    items = list(window.items)
    items.insert(chance.randint(at, len(items)), items[at])
    return _with_items(plan, window, items)


def window_with_sums_run_earlier(plan: Plan, chance: Random) -> Plan | None:
    """The window that starts sums and another run of its ops are exchanged: addends follow the sums."""
    found = []
    for rank, order in enumerate(plan.orders):
        for late, run in enumerate(order):
            plain = str(run.ref).removesuffix(" last")
            found += [
                (rank, early, late)
                for early in range(late)
                if run.kind is InstructionKind.RUN and plain != run.ref and order[early].ref == plain
            ]
    if not found:
        return None
    rank, early, late = chance.choice(found)
    order = list(plan.orders[rank])
    first, last = order[early], order[late]
    order[early] = replace(first, ref=last.ref, microbatches=(*first.microbatches, ONCE))
    order[late] = replace(last, ref=first.ref, microbatches=last.microbatches[:-1])
    return replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))


def _sums_inside(plan: Plan) -> list[tuple[Window, int]]:
    return [
        (window, at)
        for window in plan.windows.values()
        for at, item in enumerate(window.items)
        if window.actions and item.part not in window.actions
    ]


def _with_items(plan: Plan, window: Window, items: Sequence[Item]) -> Plan:
    changed = replace(window, items=tuple(items))
    return replace(plan, windows={**plan.windows, window.name: changed})


def sum_that_nobody_starts(plan: Plan, chance: Random) -> Plan | None:
    if not _starts(plan):
        return None
    rank, op = chance.choice(_starts(plan))
    wait = Op("more.sum", WAIT, (Ref("more"),), (), op.outputs, "more")
    return _with_program(plan, rank, (*plan.sums(rank), replace(op, name="more"), wait))


def sum_on_another_communicator(plan: Plan, chance: Random) -> Plan | None:
    if not _starts(plan):
        return None
    _, op = chance.choice(_starts(plan))
    others = [c.name for c in plan.communicators if c.name != op.lane]
    return with_sum(plan, summing(plan, op, op.sums, chance.choice(others))) if others else None


def sum_of_another_size(plan: Plan, chance: Random) -> Plan | None:
    """A tensor of another shape or dtype, one of its own where it needs none, or another number of ranks."""
    if not _starts(plan):
        return None
    _, op = chance.choice(_starts(plan))
    [spec] = op.outputs
    assert spec is not None
    changed = [
        replace(op, outputs=(TensorSpec((spec.shape[0] + 1,), spec.dtype),)),
        replace(op, outputs=(TensorSpec(spec.shape, "bfloat16"),)),
        replace(op, alias=None if op.alias else f"grad/{op.sums[0]}"),
        replace(op, args=(*op.args[:-1], op.args[-1] + 1)),
    ]
    return with_sum(plan, chance.choice(changed))


def gradient_out_of_its_sum(plan: Plan, chance: Random) -> Plan | None:
    found = [op for _, op in _starts(plan) if len(op.sums) > 1]
    if not found:
        return None
    op = chance.choice(found)
    gone = chance.choice(op.sums)
    return with_sum(plan, summing(plan, op, [name for name in op.sums if name != gone]))


def gradient_in_another_sum_too(plan: Plan, chance: Random) -> Plan | None:
    """Summed twice, or where it is not held, or over an axis that it has nothing on."""
    if not _starts(plan):
        return None
    _, op = chance.choice(_starts(plan))
    name = chance.choice([p.tied_to for p in plan.job.parameters])
    return with_sum(plan, summing(plan, op, (*op.sums, name)))


def next_sum_before_the_last_has_ended(plan: Plan, chance: Random) -> Plan | None:
    """The wait for one sum and the start of a later one of the same gradient are exchanged."""
    for window in plan.windows.values():
        starts = {op.name: op for op in plan.sums(plan.rank_of(window.parts[0][0]))}
        for at, first in enumerate(() if window.actions else window.items):
            if starts[str(first.ref)].target != WAIT:
                continue
            held = set(starts[starts[str(first.ref)].uses[0]].sums)
            for later in range(at + 1, len(window.items)):
                if held & set(starts[str(window.items[later].ref)].sums):
                    items = list(window.items)
                    items[at], items[later] = items[later], items[at]
                    return _with_items(plan, window, items)
    return None


def sums_in_the_wrong_order(plan: Plan, chance: Random) -> Plan | None:
    """A gradient's two sums are exchanged whole: dp first, then ties or parts."""
    for rank in range(plan.ranks):
        starts = [op for of, op in _starts(plan) if of == rank]
        for first in starts:
            for second in starts:
                if first.name != second.name and set(first.sums) & set(second.sums):
                    other: dict[str | int, str] = {first.name: second.name, second.name: first.name}
                    other |= {f"{a}.sum": f"{b}.sum" for a, b in other.items()}
                    windows = {
                        name: replace(
                            window,
                            items=tuple(replace(i, ref=other.get(i.ref, i.ref)) for i in window.items),
                        )
                        for name, window in plan.windows.items()
                        if plan.rank_of(window.parts[0][0]) == rank
                    }
                    return replace(plan, windows={**plan.windows, **windows})
    return None


def cost_of_no_communicator(plan: Plan, chance: Random) -> Plan | None:
    costs = plan.costs
    if not costs.collectives:
        return None
    (name, kind), cost = chance.choice(list(costs.collectives.items()))
    new = chance.choice([("ep", kind), (name, "gather")])
    return replace(plan, costs=replace(costs, collectives={**costs.collectives, new: cost}))


SUM_MUTATIONS: tuple[Mutation, ...] = (
    shard_of_nothing,
    tied_but_spread_differently,
    partial_forgotten,
    whole_taken_for_a_part,
    partial_and_spread,
    communicator_along_another_axis,
    drop_sum,
    sum_before_its_last_addend,
    sum_in_a_window_left_out,
    sum_in_a_window_doubled,
    window_with_sums_run_earlier,
    sum_that_nobody_starts,
    sum_on_another_communicator,
    sum_of_another_size,
    gradient_out_of_its_sum,
    gradient_in_another_sum_too,
    next_sum_before_the_last_has_ended,
    sums_in_the_wrong_order,
    cost_of_no_communicator,
)
"""Every way to break shards and sums; the test runs each on many plans."""
