"""Ways to break a plan's windows and frame.

Each takes a plan and a source of chance, and gives a plan that must be refused, or None if the plan has no
place for it (no message between ranks, for example).
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from stretto.ir.plan import InstructionKind, Item, ItemKind, Plan, Window
from tests.verifying.order_mutations import ORDER_MUTATIONS, Mutation


def _with_items(plan: Plan, window: Window, items: list[Item]) -> Plan:
    return replace(plan, windows={**plan.windows, window.name: replace(window, items=tuple(items))})


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
    window = chance.choice([window for window in plan.windows.values() if window.actions])
    stage, phase = window.parts[0]
    ops = {op.name: op for sub in phase.parts for op in plan.job.stages[stage].ops[sub]}
    users = [op.name for op in ops.values() if any(name in ops for name in op.uses)]
    if not users:
        return None
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
    joining = [at for at, communicator in enumerate(plan.communicators) if len(communicator.ranks) > 1]
    if not joining:
        return None
    at = chance.choice(joining)
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
    *ORDER_MUTATIONS,
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
