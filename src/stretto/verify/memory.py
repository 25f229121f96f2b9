"""Proves that a rank's memory suffices: an upper bound that holds whatever the times are.

What a rank holds follows from the order of its program alone: receives and sends hold their buffers from the
instruction that starts them to the one that says that they are done. Counted, in bytes:

1. parameters, one copy of each tied tensor a rank, and buffers, throughout;
2. an op's result from the op to the last use of it, or of a view of it, by any program of the rank; the
   wait for a gather or a scatter uses what is sent too (a reduction works in a copy, its result);
3. a received value from the post of its receive; a sent value at least to its `sent`;
4. a parameter's gradient from the op that makes its first part to the end of the step.

Not counted: batch, constants, optimizer state, workspaces and the allocator's waste. `stretto.simulate`
counts the same things with its own code, and a test holds the two together. May touch `stretto.ir`.
"""

from __future__ import annotations

from collections import defaultdict

from stretto.ir.action import Phase
from stretto.ir.flow import PHASES, is_external
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan
from stretto.ir.program import WAIT, Op
from stretto.verify.fault import Fault

Storage = tuple[int, str]
"""(stage, value): the value whose op, or whose receive, allocates."""

Program = tuple[int, Phase]

IN_FLIGHT = ("comm.all_gather", "comm.reduce_scatter")
"""Starts that read the value that they were given until they are waited for."""


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
    """One walk over one rank's order, op by op."""

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
        self.grads: dict[Storage, list[tuple[str, int]]] = defaultdict(list)
        for parameter in plan.job.parameters:
            for stage, _, value in parameter.grads:
                self.grads[stage, value].append((parameter.tied_to, parameter.grad_nbytes))
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
        self.level = 0
        self.highest = (0, "")

    def storage(self, stage: int, name: str) -> Storage:
        """The storage in which the value lies: follows views, and edges that stay on the rank."""
        op = self.ops.get((stage, name))
        if op is not None:
            return (stage, name) if op.alias is None else self.storage(stage, op.alias)
        edge = self.edge_into.get((stage, name))
        return self.storage(edge.source, name) if edge and edge.source in self.stages else (stage, name)

    def touched(self, stage: int, op: Op) -> list[Storage]:
        """The storages that the op makes or reads, those given from outside left out."""
        key = (stage, op.name)
        if key not in self.known:
            names = [op.name, *op.uses]
            if op.target == WAIT:
                start = self.ops[stage, op.args[0].name]
                names += start.uses if start.target in IN_FLIGHT else ()
            found = [self.storage(stage, name) for name in names if not is_external(name)]
            self.known[key] = [storage for storage in dict.fromkeys(found) if not is_external(storage[1])]
        return self.known[key]

    def nbytes(self, storage: Storage) -> int:
        op = self.ops.get(storage)
        return op.nbytes if op is not None else self.edge_into[storage].spec.nbytes

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
        window = self.plan.windows[str(instruction.ref)]
        calls = [
            (
                stage,
                window.parts[item.part][1],
                instruction.microbatches[item.part],
                self.ops[stage, str(item.ref)],
            )
            for item in window.items
            if item.kind is ItemKind.OP
            for stage in (window.parts[item.part][0],)
        ]
        last: dict[tuple[Storage, int], int] = {}
        for at, (stage, _, microbatch, op) in enumerate(calls):
            for storage in self.touched(stage, op):
                last[storage, microbatch] = at
        ending: dict[int, list[tuple[Storage, int]]] = defaultdict(list)
        for key, at in last.items():
            ending[at].append(key)
        running = {
            (stage, sub, m)
            for (stage, phase), m in zip(window.parts, instruction.microbatches, strict=True)
            for sub in phase.parts
        }
        for at, (stage, _, _, op) in enumerate(calls):
            self.level += op.nbytes
            self.note(instruction)
            for storage, microbatch in ending[at]:
                programs = sum((s, phase, microbatch) in running for s, phase in self.users[storage])
                self.done_with(storage, microbatch, programs)
            for name, nbytes in self.grads.get((stage, op.name), ()):
                if name not in self.begun:
                    self.begun.add(name)
                    self.level += nbytes
            self.note(instruction)

    def done_with(self, storage: Storage, microbatch: int, uses: int = 1) -> None:
        """Count uses that are over; after the last of all, the storage goes."""
        key = (storage, microbatch)
        left = self.left.get(key, len(self.users[storage]) + len(self.sends[storage])) - uses
        self.left[key] = left
        if left == 0 and not is_external(storage[1]):
            del self.left[key]
            self.level -= self.nbytes(storage)
