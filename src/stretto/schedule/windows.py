"""Windows of a schedule as captured: the ops of each kind of slot, with its waits and sends in their places.

A wait comes before the first op that reads a received value, a send after the op that makes a value that
leaves. Where the last run of a window completes gradients, it is a window of its own, with a reduction's
start after the op that adds to it last. As captured, a B is all of I, then all of W. Where memory is asked
for (`recompute`), W's ops come between those of I instead, as in automatic differentiation: the bits are the
same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from stretto.ir.action import Phase, Slot
from stretto.ir.plan import Item, ItemKind, Window, shares_of
from stretto.ir.program import GRAD, Job, Op


def window_name(slot: Slot) -> str:
    """`1B`, or `1F+1B` for overlapped actions; `1F+1B=0,0` where these are of one microbatch."""
    text = "+".join(f"{action.stage}{action.phase}" for action in slot.actions)
    shares = _shares(slot)
    return f"{text}={','.join(map(str, shares))}" if shares else text


def _shares(slot: Slot) -> tuple[int, ...]:
    return shares_of((action.stage, action.microbatch) for action in slot.actions)


def make_window(job: Job, slot: Slot) -> Window:
    """Step 1: the items of one kind of slot, its parts one after the other."""
    parts = tuple((action.stage, action.phase) for action in slot.actions)
    items: list[Item] = []
    for part, (stage, phase) in enumerate(parts):
        arriving = {
            edge.value: edge.index
            for edge in job.edges
            if edge.target == stage and edge.user_phase in phase.programs
        }
        leaving: dict[str, list[int]] = defaultdict(list)
        for edge in job.edges:
            if edge.source == stage and edge.phase in phase.programs:
                leaving[edge.value].append(edge.index)
        captured = [op for sub in phase.programs for op in job.stages[stage].ops[sub]]
        # Whether the job asks for memory before anything else.
        least_memory = job.recompute not in ("none", "selective", "gathers")
        for op in _memory_order(job, stage, phase) if least_memory else captured:
            for name in op.uses:
                if name in arriving:
                    items.append(Item(ItemKind.WAIT, part, arriving.pop(name)))
            items.append(Item(ItemKind.OP, part, op.name))
            items.extend(Item(ItemKind.SEND, part, edge) for edge in leaving.get(op.name, ()))
        assert not arriving, f"window of {slot}: received values that no op reads: {arriving}"
    return Window(window_name(slot), parts, tuple(items), _shares(slot))


def last_name(name: str) -> str:
    """The name of a window's last run, where that is a window of its own."""
    return f"{name} last"


def last_run(job: Job, window: Window, stage: int, leads: Sequence[Sequence[Op]]) -> Window:
    """The window's last run: what leads to each reduction comes after the last item that adds to one of its
    gradients, at its end where none does, as on a rank that has a copy and adds nothing to it.

    stage: whose program they are of. Those that can start after the same item do so in the order given."""
    adding = adding_items(job, window)
    part = len(window.parts)
    starts: dict[int, list[Item]] = defaultdict(list)
    for lead in leads:
        added = (at for op in lead for name in op.uses for at in adding.get(name, ()))
        starts[max(added, default=len(window.items) - 1)] += [Item(ItemKind.OP, part, op.name) for op in lead]
    # A stage may be empty: its window is empty, and what is to start at its end is all there is.
    items = [*starts[-1], *(each for at, item in enumerate(window.items) for each in (item, *starts[at]))]
    return Window(
        last_name(window.name),
        (*window.parts, (stage, Phase.REDUCE_GRAD)),
        tuple(items),
        (*window.shares, part) if window.shares else (),
    )


def adding_items(job: Job, window: Window) -> dict[str, list[int]]:
    """Gradient (`grad/a`) -> the window's items that add to it, ascending."""
    parts: dict[tuple[int, Phase], list[int]] = defaultdict(list)
    for part, (stage, runs) in enumerate(window.parts):
        for phase in runs.programs:
            parts[stage, phase].append(part)
    adds: dict[tuple[int, str], list[str]] = defaultdict(list)
    for parameter in job.parameters:
        for stage, phase, value in parameter.grads:
            for part in parts.get((stage, phase), ()):
                adds[part, value].append(GRAD + parameter.name)
    result: dict[str, list[int]] = defaultdict(list)
    for at, item in enumerate(window.items):
        if item.kind is ItemKind.OP:
            for grad in adds.get((item.part, str(item.ref)), ()):
                result[grad].append(at)
    return result


def _memory_order(job: Job, stage: int, phase: Phase) -> list[Op]:
    """The ops of an action; of a B, each op of W after the last op of I that it needs.

    W keeps its own order. What a tied parameter's gradient gets from W waits for what it gets from I.
    """
    programs = job.stages[stage].ops
    if phase is not Phase.B:
        return list(programs[phase])
    into = {op.name for op in programs[Phase.I]}
    missing = {op.name: into.intersection(op.uses) for op in programs[Phase.W]}
    groups: dict[str, list[str]] = {}
    for parameter in job.parameters:
        groups.setdefault(parameter.tied_to, []).extend(v for at, _, v in parameter.grads if at == stage)
    for values in groups.values():
        first = into.intersection(values)
        for value in values:
            if value in missing:
                missing[value] |= first
    waiting = deque(programs[Phase.W])
    done: set[str] = set()
    order: list[Op] = []
    for op in programs[Phase.I]:
        order.append(op)
        done.add(op.name)
        while waiting and missing[waiting[0].name] <= done:
            order.append(waiting.popleft())
    return [*order, *waiting]
