"""Ways to break a plan. Each takes a plan and a source of chance, and gives a plan that must be refused, or
None if the plan has no place for it (no message between ranks, for example)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from stretto.ir.plan import Instruction, InstructionKind, Item, ItemKind, Plan, Window

Mutation = Callable[[Plan, Random], Plan | None]
Place = tuple[int, int]
"""(rank, index in its order)."""


def _places(plan: Plan, *kinds: InstructionKind) -> list[Place]:
    return [
        (rank, at)
        for rank, order in enumerate(plan.orders)
        for at, instruction in enumerate(order)
        if instruction.kind in kinds or not kinds
    ]


def _pick(chance: Random, places: list[Place]) -> Place | None:
    return chance.choice(places) if places else None


def _with_order(plan: Plan, rank: int, order: list[Instruction]) -> Plan:
    return replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))


def _with_items(plan: Plan, window: Window, items: list[Item]) -> Plan:
    return replace(plan, windows={**plan.windows, window.name: replace(window, items=tuple(items))})


def _moved(plan: Plan, place: Place, to: int) -> Plan:
    rank, at = place
    order = list(plan.orders[rank])
    order.insert(to, order.pop(at))
    return _with_order(plan, rank, order)


def _run_with(plan: Plan, rank: int, kind: ItemKind, edge: int, microbatch: int) -> int:
    """The index of the run that sends or waits for a message."""
    for at, instruction in enumerate(plan.orders[rank]):
        if instruction.kind is InstructionKind.RUN:
            for item in plan.windows[str(instruction.ref)].items:
                if (item.kind, item.ref) == (kind, edge) and instruction.microbatches[
                    item.part
                ] == microbatch:
                    return at
    raise AssertionError("every message has a run")


# --- the order of instructions ---------------------------------------------------------------------


def drop_instruction(plan: Plan, chance: Random) -> Plan | None:
    rank, at = chance.choice(_places(plan))
    return _with_order(plan, rank, [i for k, i in enumerate(plan.orders[rank]) if k != at])


def double_instruction(plan: Plan, chance: Random) -> Plan | None:
    rank, at = chance.choice(_places(plan))
    order = list(plan.orders[rank])
    order.insert(chance.randint(0, len(order)), order[at])
    return _with_order(plan, rank, order)


def swap_runs(plan: Plan, chance: Random) -> Plan | None:
    rank = chance.randrange(plan.ranks)
    first, second = sorted(
        chance.sample([at for r, at in _places(plan, InstructionKind.RUN) if r == rank], 2)
    )
    order = list(plan.orders[rank])
    order[first], order[second] = order[second], order[first]
    return _with_order(plan, rank, order)


def receive_after_its_run(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.RECV))
    if place is None:
        return None
    recv = plan.orders[place[0]][place[1]]
    run = _run_with(plan, place[0], ItemKind.WAIT, int(recv.ref), recv.microbatches[0])
    return _moved(plan, place, chance.randint(run, len(plan.orders[place[0]]) - 1))


def swap_receives(plan: Plan, chance: Random) -> Plan | None:
    lanes: dict[tuple[int, str], list[int]] = {}
    for rank, at in _places(plan, InstructionKind.RECV):
        lanes.setdefault((rank, plan.lane_of(int(plan.orders[rank][at].ref))), []).append(at)
    full = [(rank, places) for (rank, _), places in lanes.items() if len(places) > 1]
    if not full:
        return None
    rank, places = chance.choice(full)
    first, second = chance.sample(places, 2)
    order = list(plan.orders[rank])
    order[first], order[second] = order[second], order[first]
    return _with_order(plan, rank, order)


def receive_on_another_rank(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.RECV))
    if place is None:
        return None
    rank, at = place
    other = (rank + 1) % plan.ranks
    moved = _with_order(plan, other, [plan.orders[rank][at], *plan.orders[other]])
    return _with_order(moved, rank, [i for k, i in enumerate(plan.orders[rank]) if k != at])


def another_edge(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.RECV, InstructionKind.SENT))
    if place is None or len(plan.job.edges) < 2:
        return None
    rank, at = place
    order = list(plan.orders[rank])
    edges = [edge.index for edge in plan.job.edges if edge.index != order[at].ref]
    order[at] = replace(order[at], ref=chance.choice(edges))
    return _with_order(plan, rank, order)


def another_microbatch(plan: Plan, chance: Random) -> Plan | None:
    kinds = (InstructionKind.RUN, InstructionKind.RECV, InstructionKind.SENT)
    rank, at = chance.choice(_places(plan, *kinds))
    order = list(plan.orders[rank])
    old = order[at].microbatches
    part = chance.randrange(len(old))
    new = chance.choice([m for m in range(-1, plan.job.microbatches + 1) if m != old[part]])
    order[at] = replace(order[at], microbatches=(*old[:part], new, *old[part + 1 :]))
    return _with_order(plan, rank, order)


def another_window(plan: Plan, chance: Random) -> Plan | None:
    rank, at = chance.choice(_places(plan, InstructionKind.RUN))
    order = list(plan.orders[rank])
    order[at] = replace(
        order[at], ref=chance.choice([*(n for n in plan.windows if n != order[at].ref), "none"])
    )
    return _with_order(plan, rank, order)


def sent_before_its_run(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.SENT))
    if place is None:
        return None
    sent = plan.orders[place[0]][place[1]]
    return _moved(plan, place, _run_with(plan, place[0], ItemKind.SEND, int(sent.ref), sent.microbatches[0]))


def loss_before_the_last_forward(plan: Plan, chance: Random) -> Plan | None:
    rank = plan.rank_of(plan.job.loss[0])
    places = [place for place in _places(plan, InstructionKind.LOSS) if place[0] == rank]
    return _moved(plan, places[0], 0) if places else None


def heard_before_loss(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.HEARD))
    return None if place is None else _moved(plan, place, 0)


def hear_the_loss_before_working(plan: Plan, chance: Random) -> Plan | None:
    """Legal on the rank by itself; all ranks together block."""
    holder = plan.rank_of(plan.job.loss[0])
    first = plan.rank_of(0)
    if first == holder:
        return None
    places = [place for place in _places(plan, InstructionKind.HEARD) if place[0] == first]
    early = _moved(plan, places[0], 0)
    loss = [place for place in _places(early, InstructionKind.LOSS) if place[0] == first]
    return _moved(early, loss[0], 0)


def reduce_before_its_gradient(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.REDUCE))
    return None if place is None else _moved(plan, place, 0)


def reduced_before_reduce(plan: Plan, chance: Random) -> Plan | None:
    place = _pick(chance, _places(plan, InstructionKind.REDUCED))
    return None if place is None else _moved(plan, place, 0)


def swap_ranks(plan: Plan, chance: Random) -> Plan | None:
    if plan.ranks < 2:
        return None
    first, second = chance.sample(range(plan.ranks), 2)
    orders = list(plan.orders)
    orders[first], orders[second] = orders[second], orders[first]
    return replace(plan, orders=tuple(orders))


# --- the items of a window -------------------------------------------------------------------------


def drop_item(plan: Plan, chance: Random) -> Plan | None:
    window = chance.choice(list(plan.windows.values()))
    at = chance.randrange(len(window.items))
    return _with_items(plan, window, [item for k, item in enumerate(window.items) if k != at])


def double_item(plan: Plan, chance: Random) -> Plan | None:
    window = chance.choice(list(plan.windows.values()))
    items = list(window.items)
    items.insert(chance.randint(0, len(items)), chance.choice(items))
    return _with_items(plan, window, items)


def op_before_its_input(plan: Plan, chance: Random) -> Plan | None:
    window = chance.choice(list(plan.windows.values()))
    stage, phase = window.parts[0]
    ops = {op.name: op for sub in phase.parts for op in plan.job.stages[stage].ops[sub]}
    users = [op.name for op in ops.values() if any(name in ops for name in op.uses)]
    user = chance.choice(users)
    items = list(window.items)
    at = next(k for k, item in enumerate(items) if item.ref == user and item.part == 0)
    items.insert(0, items.pop(at))
    return _with_items(plan, window, items)


def op_of_another_part(plan: Plan, chance: Random) -> Plan | None:
    window = chance.choice(list(plan.windows.values()))
    items = list(window.items)
    at = chance.randrange(len(items))
    items[at] = replace(items[at], part=items[at].part + 1)
    return _with_items(plan, window, items)


def _message_items(plan: Plan, kind: ItemKind) -> list[tuple[Window, int]]:
    return [
        (window, at)
        for window in plan.windows.values()
        for at, item in enumerate(window.items)
        if item.kind is kind
    ]


def wait_after_its_read(plan: Plan, chance: Random) -> Plan | None:
    places = _message_items(plan, ItemKind.WAIT)
    if not places:
        return None
    window, at = chance.choice(places)
    items = list(window.items)
    items.append(items.pop(at))
    return _with_items(plan, window, items)


def send_before_its_value(plan: Plan, chance: Random) -> Plan | None:
    places = _message_items(plan, ItemKind.SEND)
    if not places:
        return None
    window, at = chance.choice(places)
    items = list(window.items)
    items.insert(0, items.pop(at))
    return _with_items(plan, window, items)


def swap_sends(plan: Plan, chance: Random) -> Plan | None:
    """Both values are made, but the messages leave in an order that the receiver does not expect."""
    for window in plan.windows.values():
        lanes: dict[str, list[int]] = {}
        for at, item in enumerate(window.items):
            if item.kind is ItemKind.SEND:
                lanes.setdefault(plan.lane_of(int(item.ref)), []).append(at)
        for places in lanes.values():
            edge = plan.job.edges[int(window.items[places[0]].ref)]
            if len(places) > 1 and plan.rank_of(edge.source) != plan.rank_of(edge.target):
                items = list(window.items)
                items.append(items.pop(places[0]))
                return _with_items(plan, window, items)
    return None


# --- the frame -------------------------------------------------------------------------------------


def drop_communicator(plan: Plan, chance: Random) -> Plan | None:
    if not plan.communicators:
        return None
    at = chance.randrange(len(plan.communicators))
    return replace(plan, communicators=tuple(c for k, c in enumerate(plan.communicators) if k != at))


def double_communicator(plan: Plan, chance: Random) -> Plan | None:
    if not plan.communicators:
        return None
    return replace(plan, communicators=(*plan.communicators, chance.choice(plan.communicators)))


def communicator_members(plan: Plan, chance: Random) -> Plan | None:
    if not plan.communicators:
        return None
    at = chance.randrange(len(plan.communicators))
    found = list(plan.communicators)
    found[at] = replace(found[at], ranks=chance.choice([found[at].ranks[::-1], found[at].ranks[:1]]))
    return replace(plan, communicators=tuple(found))


def more_microbatches(plan: Plan, chance: Random) -> Plan | None:
    return replace(
        plan, job=replace(plan.job, microbatches=plan.job.microbatches + chance.choice([-1, 1, 5]))
    )


def stage_elsewhere(plan: Plan, chance: Random) -> Plan | None:
    if plan.ranks < 2:
        return None
    ranks = list(plan.schedule.stage_ranks)
    stage = chance.randrange(len(ranks))
    ranks[stage] = (ranks[stage] + 1) % plan.ranks
    return replace(plan, schedule=replace(plan.schedule, stage_ranks=tuple(ranks)))


def edge_to_another_stage(plan: Plan, chance: Random) -> Plan | None:
    if not plan.job.edges:
        return None
    edges = list(plan.job.edges)
    at = chance.randrange(len(edges))
    target = chance.choice([s for s in range(len(plan.job.stages) + 1) if s != edges[at].target])
    edges[at] = replace(edges[at], target=target)
    return replace(plan, job=replace(plan.job, edges=tuple(edges)))


def drop_edge(plan: Plan, chance: Random) -> Plan | None:
    """The last edge is forgotten by the job, and by everything that names it."""
    if not plan.job.edges:
        return None
    gone = plan.job.edges[-1].index
    kinds = (InstructionKind.RECV, InstructionKind.SENT)
    return replace(
        plan,
        job=replace(plan.job, edges=plan.job.edges[:-1]),
        orders=tuple(
            tuple(i for i in order if i.kind not in kinds or i.ref != gone) for order in plan.orders
        ),
        windows={
            name: replace(
                window, items=tuple(i for i in window.items if i.kind is ItemKind.OP or i.ref != gone)
            )
            for name, window in plan.windows.items()
        },
    )


MUTATIONS: tuple[Mutation, ...] = (
    drop_instruction,
    double_instruction,
    swap_runs,
    receive_after_its_run,
    swap_receives,
    receive_on_another_rank,
    another_edge,
    another_microbatch,
    another_window,
    sent_before_its_run,
    loss_before_the_last_forward,
    heard_before_loss,
    hear_the_loss_before_working,
    reduce_before_its_gradient,
    reduced_before_reduce,
    swap_ranks,
    drop_item,
    double_item,
    op_before_its_input,
    op_of_another_part,
    wait_after_its_read,
    send_before_its_value,
    swap_sends,
    drop_communicator,
    double_communicator,
    communicator_members,
    more_microbatches,
    stage_elsewhere,
    edge_to_another_stage,
    drop_edge,
)
"""Every way to break a plan; the test runs each on many plans."""
