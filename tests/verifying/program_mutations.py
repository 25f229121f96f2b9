"""Ways to break a random plan, each with the names that the refusal must hold at least one of.

Each takes a plan and a source of chance. What it makes is mostly wrong, and now and then harmless (two sums
that nobody compares are exchanged, a value that nobody reads is dropped): `tests.verifying.reference` tells.
None: the plan has no place for it.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from stretto.ir.flow import PHASES
from stretto.ir.plan import InstructionKind, Item, ItemKind, Plan
from stretto.ir.program import STARTS, WAIT, Stage
from tests.verifying.edits import summing, with_sum
from tests.verifying.program_edits import (
    Broken,
    Mutation,
    instruction_doubled,
    instruction_dropped,
    instructions_of,
    item_doubled,
    item_dropped,
    items_of,
    ops_of,
    pair_exchanged,
    sums_alone,
    sums_of,
    with_items,
    with_order,
)


def swap_receives(plan: Plan, chance: Random) -> Broken | None:
    return pair_exchanged(plan, chance, InstructionKind.RECV, lambda i: plan.lane_of(int(i.ref)))


def swap_sends(plan: Plan, chance: Random) -> Broken | None:
    """Two messages of one communicator leave in the other order."""
    found = []
    for window in plan.windows.values():
        lanes: dict[str, list[int]] = {}
        for at, item in enumerate(window.items):
            if item.kind is ItemKind.SEND:
                lanes.setdefault(plan.lane_of(int(item.ref)), []).append(at)
        found += [(window, places) for places in lanes.values() if len(places) > 1]
    if not found:
        return None
    window, places = chance.choice(found)
    first, second = sorted(chance.sample(places, 2))
    items = list(window.items)
    # Both behind the later of the two, so that each has its value.
    later, earlier = items[second], items[first]
    items[second : second + 1] = [later, earlier]
    del items[first]
    return with_items(plan, window, items, f"e{earlier.ref}:", f"e{later.ref}:")


def drop_send(plan: Plan, chance: Random) -> Broken | None:
    return item_dropped(plan, chance, items_of(plan, ItemKind.SEND))


def drop_message_wait(plan: Plan, chance: Random) -> Broken | None:
    return item_dropped(plan, chance, items_of(plan, ItemKind.WAIT))


def drop_receive(plan: Plan, chance: Random) -> Broken | None:
    return instruction_dropped(plan, chance, InstructionKind.RECV)


def drop_sent(plan: Plan, chance: Random) -> Broken | None:
    """Nothing says any more when the buffer may go."""
    return instruction_dropped(plan, chance, InstructionKind.SENT)


def buffer_posted_or_freed_twice(plan: Plan, chance: Random) -> Broken | None:
    return instruction_doubled(plan, chance, InstructionKind.RECV, InstructionKind.SENT)


def freed_before_it_is_sent(plan: Plan, chance: Random) -> Broken | None:
    places = instructions_of(plan, InstructionKind.SENT)
    if not places:
        return None
    rank, at = chance.choice(places)
    order = list(plan.orders[rank])
    order.insert(chance.randint(0, at), order.pop(at))
    return with_order(plan, rank, order, f"rank {rank}")


def drop_wait(plan: Plan, chance: Random) -> Broken | None:
    return item_dropped(plan, chance, items_of(plan, ItemKind.OP, (WAIT,)))


def drop_op(plan: Plan, chance: Random) -> Broken | None:
    return item_dropped(plan, chance, items_of(plan, ItemKind.OP))


def wait_before_start(plan: Plan, chance: Random) -> Broken | None:
    found = items_of(plan, ItemKind.OP, (WAIT,))
    if not found:
        return None
    window, at = chance.choice(found)
    wait = window.items[at]
    source = ops_of(plan, window)[wait.part, str(wait.ref)].args[0].name
    start = Item(ItemKind.OP, wait.part, source)
    items = list(window.items)
    if start not in items:
        return None  # an earlier window starts it
    items.insert(items.index(start), items.pop(at))
    return with_items(plan, window, items, wait.ref)


def start_twice(plan: Plan, chance: Random) -> Broken | None:
    return item_doubled(plan, chance, items_of(plan, ItemKind.OP, STARTS))


def duplicate_op(plan: Plan, chance: Random) -> Broken | None:
    return item_doubled(plan, chance, items_of(plan, ItemKind.OP))


def use_before_definition(plan: Plan, chance: Random) -> Broken | None:
    """An op, a send or a wait anywhere earlier: wrong if it passes what it needs."""
    window = chance.choice([w for w in plan.windows.values() if w.items])
    items = list(window.items)
    at = chance.randrange(len(items))
    moved = items.pop(at)
    items.insert(chance.randint(0, at), moved)
    return with_items(plan, window, items, moved.ref)


def op_of_another_stage(plan: Plan, chance: Random) -> Broken | None:
    window = chance.choice([w for w in plan.windows.values() if w.items])
    here = {op.name for op in ops_of(plan, window).values()}
    others = [op.name for s in plan.job.stages for ops in s.ops.values() for op in ops if op.name not in here]
    places = [at for at, item in enumerate(window.items) if item.kind is ItemKind.OP]
    if not others or not places:
        return None
    items = list(window.items)
    at = chance.choice(places)
    items[at] = replace(items[at], ref=chance.choice(others))
    return with_items(plan, window, items, items[at].ref, f'windows["{window.name}"]')


def repeats_nothing(plan: Plan, chance: Random) -> Broken | None:
    """An op that draws at random claims to repeat another op of its stage than it does, or none that is."""
    stage = chance.choice(plan.job.stages)
    programs = dict(stage.ops)
    found = [(phase, op) for phase in PHASES[1:] for op in programs[phase] if op.random]
    if not found:
        return None
    phase, op = chance.choice(found)
    changed = replace(op, repeats=chance.choice(["nothing", f"{op.name}_too", programs[PHASES[1]][0].name]))
    programs[phase] = tuple(changed if other is op else other for other in programs[phase])
    stages = tuple(Stage(s.index, programs) if s is stage else s for s in plan.job.stages)
    names = (op.name, f"job.stages[{stage.index}].ops.{phase}[{programs[phase].index(changed)}]")
    return Broken(replace(plan, job=replace(plan.job, stages=stages)), names)


def w_before_its_i(plan: Plan, chance: Random) -> Broken | None:
    """Any two runs exchanged of which one works for the microbatch of the other: W and I, B and F."""
    found = []
    for rank, order in enumerate(plan.orders):
        runs = [at for at, i in enumerate(order) if i.kind is InstructionKind.RUN]
        stages = {at: [s for s, _ in plan.windows[str(order[at].ref)].parts] for at in runs}
        keys = {at: set(zip(stages[at], order[at].microbatches, strict=True)) for at in runs}
        found += [(rank, a, b) for a in runs for b in runs if a < b and keys[a] & keys[b]]
    if not found:
        return None
    rank, first, second = chance.choice(found)
    order = list(plan.orders[rank])
    order[first], order[second] = order[second], order[first]
    return with_order(plan, rank, order, f"rank {rank}")


def run_of_another_microbatch(plan: Plan, chance: Random) -> Broken | None:
    rank, at = chance.choice(instructions_of(plan, InstructionKind.RUN))
    order = list(plan.orders[rank])
    part = chance.randrange(len(order[at].microbatches))
    microbatches = list(order[at].microbatches)
    microbatches[part] += chance.choice([-1, 1])
    order[at] = replace(order[at], microbatches=tuple(microbatches))
    return with_order(plan, rank, order, f"rank {rank}")


def sums_before_the_last_gradient(plan: Plan, chance: Random) -> Broken | None:
    places = sums_alone(plan)
    if not places:
        return None
    rank, at = chance.choice(places)
    order = list(plan.orders[rank])
    moved = order.pop(at)
    order.insert(chance.randint(0, at), moved)
    return with_order(plan, rank, order, f"rank {rank}, window {moved.ref}", f"rank {rank}, {moved}")


def sum_in_a_window_moved(plan: Plan, chance: Random) -> Broken | None:
    """Where it starts among what adds to the gradient, if any does."""
    found = sums_of(plan)
    if not found:
        return None
    window, at = chance.choice([(w, at) for w, at in found if w.actions] or found)
    items = list(window.items)
    moved = items.pop(at)
    items.insert(chance.randint(0, at), moved)
    return with_items(plan, window, items, moved.ref)


def drop_sum_in_a_window(plan: Plan, chance: Random) -> Broken | None:
    return item_dropped(plan, chance, sums_of(plan))


def sum_in_a_window_twice(plan: Plan, chance: Random) -> Broken | None:
    return item_doubled(plan, chance, sums_of(plan))


def swap_sums_on_one_rank(plan: Plan, chance: Random) -> Broken | None:
    """Two starts or waits, of one window or of two."""
    found = sums_of(plan)
    windows = [{str(i.ref) for i in order} for order in plan.orders]
    pairs = [
        (one, other)
        for one in found
        for other in found
        if one != other and any({one[0].name, other[0].name} <= names for names in windows)
    ]
    if not pairs:
        return None
    (one, k), (other, m) = chance.choice(pairs)
    first, second = one.items[k], other.items[m]
    items = list(one.items)
    items[k] = replace(first, ref=second.ref)
    changed = {**plan.windows, one.name: replace(one, items=tuple(items))}
    items = list(changed[other.name].items)
    items[m] = replace(second, ref=first.ref)
    plan = replace(plan, windows=changed)
    names = (first.ref, second.ref, f"window {one.name}")  # both windows are changed
    return with_items(plan, changed[other.name], items, *names)


def swap_loss_and_tied_sum(plan: Plan, chance: Random) -> Broken | None:
    """On one rank the loss is told after a sum that joins places, or before it, as no other rank does."""
    found = []
    for rank, order in enumerate(plan.orders):
        loss, *tied = [at for r, at in sums_alone(plan) if r == rank and at < len(order) - 1] or [0]
        found += [(rank, loss, other) for other in tied]
    if not found:
        return None
    rank, loss, tied_sum = chance.choice(found)
    order = list(plan.orders[rank])
    order.insert(tied_sum, order.pop(loss))
    return with_order(plan, rank, order, f"rank {rank}")


def drop_sum(plan: Plan, chance: Random) -> Broken | None:
    places = sums_alone(plan)
    if not places:
        return None
    rank, at = chance.choice(places)
    order = [i for k, i in enumerate(plan.orders[rank]) if k != at]
    return with_order(plan, rank, order, f"rank {rank}")


def sum_twice(plan: Plan, chance: Random) -> Broken | None:
    places = sums_alone(plan)
    if not places:
        return None
    rank, at = chance.choice(places)
    order = list(plan.orders[rank])
    order.insert(chance.randint(at, len(order)), order[at])
    return with_order(plan, rank, order, f"rank {rank}, window {order[at].ref}", f"rank {rank}, {order[at]}")


def communicator_without_a_member(plan: Plan, chance: Random) -> Broken | None:
    places = [at for at, found in enumerate(plan.communicators) if len(found.ranks) > 1]
    if not places:
        return None
    found = list(plan.communicators)
    at = chance.choice(places)
    gone = chance.choice(found[at].ranks)
    found[at] = replace(found[at], ranks=tuple(rank for rank in found[at].ranks if rank != gone))
    return Broken(replace(plan, communicators=tuple(found)), (f"communicator {found[at].name}",))


def gradient_out_of_its_sum(plan: Plan, chance: Random) -> Broken | None:
    found = [op for rank in range(plan.ranks) for op in plan.sums(rank) if len(op.sums) > 1]
    if not found:
        return None
    op = chance.choice(found)
    gone = chance.choice(op.sums)
    new = summing(plan, op, [name for name in op.sums if name != gone])
    return Broken(with_sum(plan, new), (f"gradient of {gone}", op.name))


MUTATIONS: tuple[Mutation, ...] = (
    swap_receives,
    swap_sends,
    drop_send,
    drop_message_wait,
    drop_receive,
    drop_sent,
    buffer_posted_or_freed_twice,
    freed_before_it_is_sent,
    drop_wait,
    drop_op,
    wait_before_start,
    start_twice,
    duplicate_op,
    use_before_definition,
    op_of_another_stage,
    repeats_nothing,
    w_before_its_i,
    run_of_another_microbatch,
    sums_before_the_last_gradient,
    sum_in_a_window_moved,
    drop_sum_in_a_window,
    sum_in_a_window_twice,
    swap_sums_on_one_rank,
    swap_loss_and_tied_sum,
    drop_sum,
    sum_twice,
    communicator_without_a_member,
    gradient_out_of_its_sum,
)
"""Every way; the fuzz takes each on every plan."""
