"""Windows of a schedule as captured: the ops of each kind of slot, with its waits and sends in their places.

A wait comes before the first op that reads a received value, a send after the op that makes a value that
leaves. A run of a window with ops of what runs once a step (`Guests`) is a window of its own. As captured, a
B is all of I, then all of W. Where memory is asked for (`recompute`), W's ops come between those of I
instead, as in automatic differentiation: the bits are the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stretto.ir.action import AFTER, BEFORE, ONCE, Phase, Slot
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


@dataclass
class Guests:
    """Ops of what runs once a step, in one run of a window.

    begins: gathers' starts with what leads to them, before all items. tails: what waits for a gather, before
    the first item that reads what it makes, or where it is for another start, at the end. leads: what leads
    to each reduction, after the last item that adds to one of its gradients; at the end where none does, as
    on a rank that has a copy and adds nothing to it. ends: what waits for a reduction and leads to another,
    at the end.
    """

    begins: list[list[Op]] = field(default_factory=list)
    tails: list[list[Op]] = field(default_factory=list)
    leads: list[list[Op]] = field(default_factory=list)
    ends: list[list[Op]] = field(default_factory=list)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Whose ops these are."""
        before, after = self.begins or self.tails, self.leads or self.ends
        return (BEFORE,) * bool(before) + (AFTER,) * bool(after)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Of the parts that a run has besides its actions."""
        return (ONCE,) * len(self.phases)

    @property
    def all_ops(self) -> Iterator[Op]:
        return (op for ops in (*self.begins, *self.tails, *self.leads, *self.ends) for op in ops)

    def name(self, window: str) -> str:
        """Of a window's run with these, which is a window of its own."""
        return " ".join([window, *(_NAMES[phase] for phase in self.phases)])


_NAMES = {BEFORE: "first", AFTER: "last"}


def with_guests(job: Job, window: Window, name: str, stage: int, guests: Guests) -> Window:
    """A run of a window with ops of what runs once a step, as a window of its own. stage: whose programs
    these are. Those that can start after the same item do so in the order given."""
    adding = adding_items(job, window)
    reads = _first_reads(job, window)
    end = len(window.items)
    at_item: dict[int, list[Item]] = defaultdict(list)
    """Item -> what comes before it."""

    def add(at: int, ops: Sequence[Op], part: int) -> None:
        at_item[at] += [Item(ItemKind.OP, part, op.name) for op in ops]

    parts = [*window.parts]
    for phase in guests.phases:
        part = len(parts)
        parts.append((stage, phase))
        if phase is BEFORE:
            for begin in guests.begins:
                add(0, begin, part)
            for tail in guests.tails:
                written = (name for op in tail for name in op.writes if name in reads)
                add(min((reads[name] for name in written), default=end), tail, part)
        else:
            for lead in guests.leads:
                added = (at for op in lead for value in op.uses for at in adding.get(value, ()))
                add(max(added, default=end - 1) + 1, lead, part)
            for ops in guests.ends:
                add(end, ops, part)
    # A stage may be empty: its window is empty, and what is to start at its end is all there is.
    items: list[Item] = []
    for at, item in enumerate(window.items):
        items += [*at_item[at], item]
    items += at_item[end]
    # The actions' microbatches, and that of what runs once a step.
    bound = (*(window.shares or range(len(window.parts))), *(len(window.parts) for _ in guests.phases))
    shares = shares_of((0, share) for share in bound)
    return Window(name, tuple(parts), tuple(items), shares)


def _first_reads(job: Job, window: Window) -> dict[str, int]:
    """Parameter (`param/a`) -> the first item that reads it."""
    result: dict[str, int] = {}
    ops = [{op.name: op for op in job.stages[stage].all_ops} for stage, _ in window.parts]
    for at, item in enumerate(window.items):
        if item.kind is ItemKind.OP:
            for name in ops[item.part][str(item.ref)].uses:
                result.setdefault(name, at)
    return result


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
