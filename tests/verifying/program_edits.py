"""Edits of random plans that mutations are made of: an item of a window, an instruction of an order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from stretto.ir.plan import Instruction, InstructionKind, Item, ItemKind, Plan, Window
from stretto.ir.program import Op


@dataclass(frozen=True)
class Broken:
    """names: of the window, instruction, op or communicator; any of them tells a reader where to look."""

    plan: Plan
    names: tuple[str, ...]


Mutation = Callable[[Plan, Random], Broken | None]
Place = tuple[int, int]
"""(rank, index in its order)."""


def ops_of(plan: Plan, window: Window) -> dict[tuple[int, str], Op]:
    return {
        (part, op.name): op
        for part, (stage, phase) in enumerate(window.parts)
        for sub in phase.parts
        for op in plan.job.stages[stage].ops[sub]
    }


def items_of(plan: Plan, kind: ItemKind, targets: Sequence[str] = ()) -> list[tuple[Window, int]]:
    """(window, index) of items of a kind; of ops with these targets, where there are any."""
    found = []
    for window in plan.windows.values():
        ops = ops_of(plan, window)
        for at, item in enumerate(window.items):
            if item.kind is kind and (not targets or ops[item.part, str(item.ref)].target in targets):
                found.append((window, at))
    return found


def sums_of(plan: Plan) -> list[tuple[Window, int]]:
    """(window, index) of starts of sums and waits for them."""
    found = items_of(plan, ItemKind.OP)
    return [(window, at) for window, at in found if window.items[at].part not in window.actions]


def sums_alone(plan: Plan) -> list[Place]:
    """Runs of windows of sums alone."""
    places = instructions_of(plan, InstructionKind.RUN)
    return [(r, at) for r, at in places if not plan.windows[str(plan.orders[r][at].ref)].actions]


def with_items(plan: Plan, window: Window, items: Sequence[Item], *names: object) -> Broken:
    changed = replace(plan, windows={**plan.windows, window.name: replace(window, items=tuple(items))})
    return Broken(changed, (f"window {window.name}", f"windows.{window.name}", *map(str, names)))


def instructions_of(plan: Plan, *kinds: InstructionKind) -> list[Place]:
    return [
        (rank, at)
        for rank, order in enumerate(plan.orders)
        for at, instruction in enumerate(order)
        if instruction.kind in kinds
    ]


def with_order(plan: Plan, rank: int, order: Sequence[Instruction], *names: object) -> Broken:
    changed = replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))
    return Broken(changed, tuple(map(str, names)))


def pair_exchanged(
    plan: Plan, chance: Random, kind: InstructionKind, lane: Callable[[Instruction], object]
) -> Broken | None:
    """Two instructions of a kind and a lane, exchanged on one rank."""
    lanes: dict[object, list[Place]] = {}
    for rank, at in instructions_of(plan, kind):
        lanes.setdefault((rank, lane(plan.orders[rank][at])), []).append((rank, at))
    full = [places for places in lanes.values() if len(places) > 1]
    if not full:
        return None
    (rank, first), (_, second) = chance.sample(chance.choice(full), 2)
    order = list(plan.orders[rank])
    order[first], order[second] = order[second], order[first]
    return with_order(plan, rank, order, order[first], order[second], f"rank {rank}")


def item_dropped(plan: Plan, chance: Random, found: list[tuple[Window, int]]) -> Broken | None:
    if not found:
        return None
    window, at = chance.choice(found)
    items = [item for k, item in enumerate(window.items) if k != at]
    return with_items(plan, window, items, window.items[at].ref)


def instruction_dropped(plan: Plan, chance: Random, *kinds: InstructionKind) -> Broken | None:
    places = instructions_of(plan, *kinds)
    if not places:
        return None
    rank, at = chance.choice(places)
    order = [i for k, i in enumerate(plan.orders[rank]) if k != at]
    return with_order(plan, rank, order, f"rank {rank}")


def instruction_doubled(plan: Plan, chance: Random, *kinds: InstructionKind) -> Broken | None:
    places = instructions_of(plan, *kinds)
    if not places:
        return None
    rank, at = chance.choice(places)
    order = list(plan.orders[rank])
    order.insert(chance.randint(at, len(order)), order[at])
    return with_order(plan, rank, order, f"rank {rank}, {order[at]}")


def item_doubled(plan: Plan, chance: Random, found: list[tuple[Window, int]]) -> Broken | None:
    if not found:
        return None
    window, at = chance.choice(found)
    items = list(window.items)
    items.insert(chance.randint(at, len(items)), items[at])
    return with_items(plan, window, items, items[at].ref)
