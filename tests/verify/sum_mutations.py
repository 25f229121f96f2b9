"""Ways to break what a plan says of shards, communicators along axes, and sums of gradients.

Each takes a plan and a source of chance, and gives a plan that must be refused, or None if the plan has no
place for it (no bucket, for example).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from stretto.ir.plan import InstructionKind, Item, ItemKind, Plan, Window
from stretto.ir.program import Shard, TensorSpec
from stretto.schedule.windows import adding_items
from tests.verify.comm_mutations import lowered_again, with_parameter
from tests.verify.order_mutations import Mutation


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


def drop_bucket(plan: Plan, chance: Random) -> Plan | None:
    """It is forgotten by all that name it."""
    if not plan.buckets:
        return None
    gone = chance.choice(plan.buckets).name
    return replace(
        plan,
        buckets=tuple(b for b in plan.buckets if b.name != gone),
        orders=tuple(tuple(i for i in order if i.ref != gone) for order in plan.orders),
        windows={
            name: replace(window, items=tuple(item for item in window.items if item.ref != gone))
            for name, window in plan.windows.items()
        },
    )


def sum_before_its_last_addend(plan: Plan, chance: Random) -> Plan | None:
    """Inside the window that completes the gradient, the sum starts too early."""
    found = _sums_inside(plan)
    if not found:
        return None
    window, at = chance.choice(found)
    groups = plan.bucket(str(window.items[at].ref)).parameters
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
    order[early], order[late] = (
        replace(order[early], ref=order[late].ref),
        replace(order[late], ref=order[early].ref),
    )
    return replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))


def _sums_inside(plan: Plan) -> list[tuple[Window, int]]:
    return [
        (window, at)
        for window in plan.windows.values()
        for at, item in enumerate(window.items)
        if item.kind is ItemKind.REDUCE
    ]


def _with_items(plan: Plan, window: Window, items: Sequence[Item]) -> Plan:
    changed = replace(window, items=tuple(items))
    return replace(plan, windows={**plan.windows, window.name: changed})


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
        names = [
            str(item.ref)
            for i in order
            for item in (plan.windows[str(i.ref)].items if i.kind is InstructionKind.RUN else (i,))
            if item.kind in (ItemKind.REDUCE, InstructionKind.REDUCE)
        ]
        for k, first in enumerate(names):
            for second in names[k + 1 :]:
                if set(plan.bucket(first).parameters) & set(plan.bucket(second).parameters):
                    other = {first: second, second: first}
                    changed = tuple(
                        replace(i, ref=other.get(str(i.ref), i.ref)) if i.kind in kinds else i for i in order
                    )
                    windows = {
                        name: replace(
                            window,
                            items=tuple(
                                replace(item, ref=other.get(str(item.ref), item.ref))
                                if item.kind is ItemKind.REDUCE
                                else item
                                for item in window.items
                            ),
                        )
                        for name, window in plan.windows.items()
                    }
                    orders = (*plan.orders[:rank], changed, *plan.orders[rank + 1 :])
                    return replace(plan, orders=orders, windows=windows)
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
    drop_bucket,
    sum_before_its_last_addend,
    sum_in_a_window_left_out,
    sum_in_a_window_doubled,
    window_with_sums_run_earlier,
    bucket_that_nobody_starts,
    bucket_on_another_communicator,
    gradient_out_of_its_bucket,
    gradient_in_another_bucket_too,
    next_sum_before_the_last_has_ended,
    sums_in_the_wrong_order,
    cost_of_no_communicator,
)
"""Every way to break shards and sums; the test runs each on many plans."""
