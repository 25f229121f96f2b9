"""Ways to break a plan in the order of its instructions.

Each takes a plan and a source of chance, and gives a plan that must be refused, or None if the plan has no
place for it (no message between ranks, for example).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan

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
    first, second = sorted(chance.sample([at for at, _, _ in plan.runs(rank)], 2))
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


def _sums_alone(plan: Plan) -> list[Place]:
    """Runs of windows of sums alone."""
    return [
        (rank, at)
        for rank, at in _places(plan, InstructionKind.RUN)
        if not plan.windows[str(plan.orders[rank][at].ref)].actions
    ]


def _run_of(plan: Plan, rank: int, name: str) -> Place:
    """The run of sums alone in which an op runs."""
    [found] = [
        (r, at)
        for r, at in _sums_alone(plan)
        if r == rank and any(i.ref == name for i in plan.windows[str(plan.orders[r][at].ref)].items)
    ]
    return found


def _loss_of(plan: Plan, rank: int) -> str:
    """The op that starts the sum of the loss; "" where there is none."""
    return next((op.name for op in plan.sums(rank) if op.lane == "loss"), "")


def loss_before_the_last_forward(plan: Plan, chance: Random) -> Plan | None:
    rank = plan.rank_of(plan.job.loss[0])
    loss = _loss_of(plan, rank)
    return _moved(plan, _run_of(plan, rank, loss), 0) if loss else None


def heard_before_loss(plan: Plan, chance: Random) -> Plan | None:
    rank = chance.randrange(plan.ranks)
    loss = _loss_of(plan, rank)
    return _moved(plan, _run_of(plan, rank, f"{loss}.sum"), 0) if loss else None


def hear_the_loss_before_working(plan: Plan, chance: Random) -> Plan | None:
    """Legal on the rank by itself; all ranks together block."""
    holder = plan.rank_of(plan.job.loss[0])
    first = plan.rank_of(0)
    if first == holder:
        return None
    loss = _loss_of(plan, first)
    rank, at = _run_of(plan, first, loss)
    begin, end = (plan.windows[str(plan.orders[rank][k].ref)] for k in (at, -1))
    items = {item.ref: item for item in end.items}
    heard = replace(begin, items=(*begin.items, items.pop(f"{loss}.sum")))
    windows = {**plan.windows, begin.name: heard, end.name: replace(end, items=tuple(items.values()))}
    return _moved(replace(plan, windows=windows), (rank, at), 0)


def sums_before_their_gradients(plan: Plan, chance: Random) -> Plan | None:
    """All but those of the loss, which a rank without one may start at any time."""
    losses = [_run_of(plan, rank, loss) for rank in range(plan.ranks) if (loss := _loss_of(plan, rank))]
    places = [place for place in _sums_alone(plan) if place not in losses]
    place = _pick(chance, places)
    return None if place is None else _moved(plan, place, 0)


def swap_ranks(plan: Plan, chance: Random) -> Plan | None:
    if plan.ranks < 2:
        return None
    first, second = chance.sample(range(plan.ranks), 2)
    orders = list(plan.orders)
    orders[first], orders[second] = orders[second], orders[first]
    return replace(plan, orders=tuple(orders))


ORDER_MUTATIONS: tuple[Mutation, ...] = (
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
    sums_before_their_gradients,
    swap_ranks,
)
"""Every way to break an order."""
