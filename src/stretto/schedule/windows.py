"""Windows of a schedule as captured: the ops of each kind of slot, with its waits and sends in their places.

A wait comes before the first op that reads a received value, a send after the op that makes a value that
leaves: a message leaves when its tensor is ready, and is waited for as late as possible.
"""

from __future__ import annotations

from collections import defaultdict

from stretto.ir.action import Slot
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import Job
from stretto.schedule.memory_order import holds_least, memory_order


def window_name(slot: Slot) -> str:
    """`1B`, or `1F+1B` for overlapped actions; `1F+1B=0,0` where these are of one microbatch."""
    text = "+".join(f"{action.stage}{action.phase}" for action in slot.actions)
    shares = shares_of(slot)
    return f"{text}={','.join(map(str, shares))}" if shares else text


def shares_of(slot: Slot) -> tuple[int, ...]:
    """`Window.shares` of a slot."""
    places = [(action.stage, action.microbatch) for action in slot.actions]
    found = tuple(places.index(place) for place in places)
    return () if found == tuple(range(len(places))) else found


def make_window(job: Job, slot: Slot) -> Window:
    """Step 1: the items of one kind of slot, its parts one after the other."""
    parts = tuple((action.stage, action.phase) for action in slot.actions)
    items: list[Item] = []
    for part, (stage, phase) in enumerate(parts):
        arriving = {
            edge.value: edge.index
            for edge in job.edges
            if edge.target == stage and edge.user_phase in phase.parts
        }
        leaving: dict[str, list[int]] = defaultdict(list)
        for edge in job.edges:
            if edge.source == stage and edge.phase in phase.parts:
                leaving[edge.value].append(edge.index)
        captured = [op for sub in phase.parts for op in job.stages[stage].ops[sub]]
        for op in memory_order(job, stage, phase) if holds_least(job) else captured:
            for name in op.uses:
                if name in arriving:
                    items.append(Item(ItemKind.WAIT, part, arriving.pop(name)))
            items.append(Item(ItemKind.OP, part, op.name))
            items.extend(Item(ItemKind.SEND, part, edge) for edge in leaving.get(op.name, ()))
        assert not arriving, f"window of {slot}: received values that no op reads: {arriving}"
    return Window(window_name(slot), parts, tuple(items), shares_of(slot))
