"""Proves that a rank's memory suffices: an upper bound that holds whatever the times are.

What a rank holds follows from the order of its program alone: receives and sends hold their buffers from the
instruction that starts them to the one that says that they are done. Counted, in bytes:

1. parameters, one copy of each tied tensor a rank, and buffers, throughout;
2. an op's results from the op to the last use of each, or of a view of it, by any program of the rank; the
   wait for a gather or a scatter uses what is sent too (a reduction works in a copy, its result);
3. a received value from the post of its receive; a sent value at least to its `sent`;
4. a parameter's gradient from the op that makes its first part to the end of the step; a product that is
   added while it is multiplied (`stretto.ir.gradients`) is nothing but the gradient that it begins;
5. what gradients that are summed together, or among some ranks of an axis only, are put into, from the start
   to the wait.

Not counted: batch, constants, optimizer state, workspaces and the allocator's waste. `stretto.simulate`
counts the same things with its own code, and a test holds the two together. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, is_external
from stretto.ir.gradients import Addend, addends
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan, Window
from stretto.ir.program import STEP_LOSS, WAIT, Op
from stretto.ir.storage import in_flight, makes, owner, reads
from stretto.verify.fault import Fault

Storage = tuple[int, str]
"""(stage, value): the value whose op, or whose receive, allocates."""

Program = tuple[int, Phase]


def memory_faults(plan: Plan, max_bytes: int) -> list[Fault]:
    """A fault for each rank that holds more than `max_bytes`. The plan must have no other fault."""
    found = []
    for rank in range(plan.ranks):
        peak, at = _RankWalk(plan, rank).peak()
        if peak > max_bytes:
            found.append(
                Fault(
                    rank,
                    at,
                    f"holds {peak:,} bytes, {peak - max_bytes:,} more than the limit of {max_bytes:,}",
                    "Use a schedule with fewer live microbatches, smaller microbatches or more stages",
                )
            )
    return found


def peak_bytes(plan: Plan, rank: int) -> int:
    """The most bytes that the rank holds at any point of its order."""
    return _RankWalk(plan, rank).peak()[0]


class _RankWalk:
    """One walk over one rank's order. What a window does is worked out op by op, once for each case."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.stages = set(plan.schedule.stages_of(rank))
        self.ops: dict[Storage, Op] = {
            (stage, op.name): op
            for stage in self.stages
            for phase in PHASES
            for op in plan.job.stages[stage].ops[phase]
        }
        self.edge_into = {(e.target, e.value): e for e in plan.job.edges if e.target in self.stages}
        self.addends: dict[Storage, tuple[Addend, ...]] = {
            (stage, value): of for stage in self.stages for value, of in addends(plan.job, stage).items()
        }
        self.sums = {op.name: op for op in plan.sums(rank)}
        # By group of tied parameters: the names that the rank holds, bytes of one gradient.
        self.tied: dict[str, list[str]] = defaultdict(list)
        self.tied_bytes: dict[str, int] = {}
        for parameter in plan.job.parameters:
            if self.stages.intersection(parameter.stages):
                self.tied[parameter.tied_to].append(parameter.name)
                self.tied_bytes[parameter.tied_to] = parameter.grad_nbytes
        self.made: dict[Storage, int] = {
            (stage, name): nbytes
            for (stage, _), op in self.ops.items()
            if not self.is_product(stage, op)
            for name, nbytes in makes(op)
        }
        self.known: dict[tuple[int, str], list[Storage]] = {}
        # Who must be done with a storage before it goes: programs that use it, and sends of it.
        self.users: dict[Storage, set[Program]] = defaultdict(set)
        self.sends: dict[Storage, set[int]] = defaultdict(set)
        for stage in self.stages:
            for phase in PHASES:
                for op in plan.job.stages[stage].ops[phase]:
                    for storage in self.touched(stage, op):
                        self.users[storage].add((stage, phase))
        for edge in plan.job.edges:
            if edge.source in self.stages and edge.target not in self.stages:
                self.sends[self.storage(edge.source, edge.value)].add(edge.index)
        self.left: dict[tuple[Storage, int], int] = {}
        self.begun: set[str] = set()
        self.shapes: dict[tuple[str, tuple[int, ...]], _Shape] = {}
        self.effects: dict[tuple[object, ...], tuple[int, int]] = {}
        self.level = 0
        self.highest = (0, "")

    def storage(self, stage: int, name: str) -> Storage:
        """The storage in which the value lies: follows views, and edges that stay on the rank."""
        op = self.ops.get((stage, name))
        if op is not None:
            lies_in = owner(op)
            return (stage, name) if lies_in == name else self.storage(stage, lies_in)
        edge = self.edge_into.get((stage, name))
        return self.storage(edge.source, name) if edge and edge.source in self.stages else (stage, name)

    def is_product(self, stage: int, op: Op) -> bool:
        return any(addend.product for addend in self.addends.get((stage, op.name), ()))

    def made_by(self, stage: int, op: Op) -> int:
        return sum(self.made.get((stage, name), 0) for name, _ in makes(op))

    def touched(self, stage: int, op: Op) -> list[Storage]:
        """The storages that the op makes or reads, those given from outside left out."""
        key = (stage, op.name)
        if key not in self.known:
            made = () if self.is_product(stage, op) else makes(op)
            names = [*(name for name, _ in made), *reads(op)]
            if op.target == WAIT:
                start = self.ops[stage, op.args[0].name]
                names += in_flight(start)
            found = [self.storage(stage, name) for name in names if not is_external(name)]
            self.known[key] = [storage for storage in dict.fromkeys(found) if not is_external(storage[1])]
        return self.known[key]

    def nbytes(self, storage: Storage) -> int:
        return self.made[storage] if storage in self.made else self.edge_into[storage].spec.nbytes

    def peak(self) -> tuple[int, str]:
        """(bytes, the instruction at which they are held)."""
        held = {
            p.tied_to: p.held_nbytes for p in self.plan.job.parameters if self.stages.intersection(p.stages)
        }
        buffers = [b.spec.nbytes for b in self.plan.job.buffers if self.stages.intersection(b.stages)]
        self.level = sum(held.values()) + sum(buffers)
        self.highest = (self.level, "")
        for instruction in self.plan.orders[self.rank]:
            if instruction.kind is InstructionKind.RECV:
                self.level += self.plan.job.edges[int(instruction.ref)].spec.nbytes
            elif instruction.kind is InstructionKind.SENT:
                edge = self.plan.job.edges[int(instruction.ref)]
                self.done_with(self.storage(edge.source, edge.value), instruction.microbatches[0])
            elif instruction.kind is InstructionKind.RUN:
                self.run(instruction)
            self.note(instruction)
        return self.highest

    def note(self, instruction: Instruction) -> None:
        if self.level > self.highest[0]:
            self.highest = (self.level, str(instruction))

    def run(self, instruction: Instruction) -> None:
        """All that a run does, at once: what the window always does, and which lasting values end in it."""
        window = self.plan.windows[str(instruction.ref)]
        microbatches = instruction.microbatches
        # Parts of one microbatch may share values; which number it has plays no part.
        pattern = tuple(microbatches.index(m) for m in microbatches)
        if (window.name, pattern) not in self.shapes:
            self.shapes[window.name, pattern] = self.shape(window, pattern)
        shape = self.shapes[window.name, pattern]
        ends = tuple(self.ends(last.storage, microbatches[last.part], last.uses) for last in shape.lasting)
        begins = tuple(addend.parameter not in self.begun for _, addend in shape.grads)
        self.begun.update(addend.parameter for _, addend in shape.grads)
        sums = tuple(self.reduce(self.sums[name]) for _, name in shape.sums)
        key = (window.name, pattern, ends, begins, sums)
        if key not in self.effects:
            self.effects[key] = shape.effect(self, ends, begins, sums)
        peak, change = self.effects[key]
        if self.level + peak > self.highest[0]:
            self.highest = (self.level + peak, str(instruction))
        self.level += change

    def reduce(self, op: Op) -> tuple[int, int]:
        """A sum starts, or is waited for. Gradients of tied parameters become one before; where none is,
        zeros. Returns (the most bytes above those before, bytes more after it)."""
        if op.target == WAIT:
            return 0, -self.sums[op.uses[0]].nbytes
        level = peak = 0
        for name in op.sums if op.alias != STEP_LOSS else ():
            begun = self.begun.intersection(self.tied[name])
            if len(begun) != 1:
                peak = max(peak, level + self.tied_bytes[name])
                level += (1 - len(begun)) * self.tied_bytes[name]
                self.begun -= begun
                self.begun.add(self.tied[name][0])
        level += op.nbytes
        return max(peak, level), level

    def shape(self, window: Window, pattern: tuple[int, ...]) -> _Shape:
        """What every run of the window does. pattern: for each part, the first part of its microbatch."""
        calls = [
            (
                window.parts[item.part][0],
                pattern[item.part],
                self.ops[window.parts[item.part][0], str(item.ref)],
            )
            for item in window.items
            if item.kind is ItemKind.OP and item.part in window.actions
        ]
        last: dict[tuple[Storage, int], int] = {}
        grads: dict[str, tuple[int, Addend]] = {}
        for at, (stage, part, op) in enumerate(calls):
            for storage in self.touched(stage, op):
                last[storage, part] = at
            for addend in self.addends.get((stage, op.name), ()):
                grads.setdefault(addend.parameter, (at, addend))
        running = {
            (stage, sub, part)
            for (stage, phase), part in zip(window.parts, pattern, strict=True)
            for sub in phase.parts
        }
        changes = [(self.made_by(stage, op), 0) for stage, _, op in calls]
        before = 0
        sums: list[tuple[int, str]] = []
        for item in window.items:
            if item.part not in window.actions:
                sums.append((before, str(item.ref)))
            else:
                before += item.kind is ItemKind.OP
        lasting: list[_Last] = []
        for (storage, part), at in last.items():
            uses = sum((stage, phase, part) in running for stage, phase in self.users[storage])
            if uses == len(self.users[storage]) + len(self.sends[storage]):
                changes[at] = (changes[at][0], changes[at][1] - self.nbytes(storage))
            else:
                lasting.append(_Last(at, storage, part, uses))
        return _Shape(tuple(changes), tuple(lasting), tuple(grads.values()), tuple(sums))

    def done_with(self, storage: Storage, microbatch: int) -> None:
        """A message has left; the storage goes if nothing else needs it."""
        if self.ends(storage, microbatch, 1):
            self.level -= self.nbytes(storage)

    def ends(self, storage: Storage, microbatch: int, uses: int) -> bool:
        """Count uses that are over; whether they were the last of all. What is given from outside stays."""
        key = (storage, microbatch)
        left = self.left.get(key, len(self.users[storage]) + len(self.sends[storage])) - uses
        self.left[key] = left
        if left or is_external(storage[1]):
            return False
        del self.left[key]
        return True


@dataclass(frozen=True, slots=True)
class _Last:
    """A window's last use of a value that other windows or messages use as well. part: whose microbatch;
    uses: how many of the rank's programs that use it are in the window."""

    at: int
    storage: Storage
    part: int
    uses: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """What runs of a window do to memory. changes: for each op, the bytes that it makes and those that go
    after it in any run; grads: (op, addend) of gradients that begin there if they have not; sums: (how many
    ops run before it, op) of each sum that starts or ends."""

    changes: tuple[tuple[int, int], ...]
    lasting: tuple[_Last, ...]
    grads: tuple[tuple[int, Addend], ...]
    sums: tuple[tuple[int, str], ...]

    def effect(
        self,
        walk: _RankWalk,
        ends: tuple[bool, ...],
        begins: tuple[bool, ...],
        sums: tuple[tuple[int, int], ...],
    ) -> tuple[int, int]:
        """(the most bytes above those before the run, bytes after it), when these values end and these
        gradients begin. sums: what each sum's start does, as `_RankWalk.reduce` says."""
        made = [nbytes for nbytes, _ in self.changes]
        after = [gone for _, gone in self.changes]
        for last, end in zip(self.lasting, ends, strict=True):
            if end:
                after[last.at] -= walk.nbytes(last.storage)
        for (at, addend), begin in zip(self.grads, begins, strict=True):
            if begin:
                # A value that becomes the gradient goes as the gradient comes; a copy stands beside it.
                (made if addend.product or addend.copied else after)[at] += addend.nbytes
        level = peak = 0
        waiting = [(at, *does) for (at, _), does in zip(self.sums, sums, strict=True)]
        for at in range(len(made) + 1):
            while waiting and waiting[0][0] == at:
                _, most, change = waiting.pop(0)
                peak = max(peak, level + most)
                level += change
            if at < len(made):
                peak = max(peak, level + made[at], level + made[at] + after[at])
                level += made[at] + after[at]
        return peak, level
