"""Proves that a rank's memory suffices: an upper bound that is true whatever the times are.

What a rank keeps follows from the order of its program alone: receives and sends have their buffers from the
instruction that starts them to the one that says that they are done. Counted, in bytes:

1. parameters, one copy of each tied tensor a rank, buffers and the optimizer's state, throughout;
2. an op's results from the op to the last use of each, or of a view of it, by any program of the rank; the
   wait for a gather or a scatter uses what is sent too (a reduction works in a copy, its result);
3. a received value from the post of its receive; a sent value at least to its `sent`;
4. a parameter's gradient from the op that makes its first part to the end of the step; a product that is
   added while it is multiplied (`stretto.ir.storage`) is nothing but the gradient that it begins;
5. what gradients that are summed together, or among some ranks of an axis only, are put into, from the start
   to the wait, as the result of any op; those of tied parameters become one before.

Not counted: batch, constants, workspaces and the allocator's waste. `stretto.simulate`
counts the same things with its own code, and a test compares the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from stretto.ir.flow import is_external
from stretto.ir.plan import InstructionKind, ItemKind, Plan
from stretto.ir.program import WAIT, Op, Parameter
from stretto.ir.storage import PartialSum, in_flight, makes, owner, partial_sums, reads
from stretto.verifying.fault import Fault

Storage = tuple[int, str]
"""(stage, value): the value whose op, or whose receive, allocates."""


@dataclass(frozen=True, slots=True)
class MemoryFault(Fault):
    """A rank that has more than it may. holds_bytes: the most at any point of its order."""

    holds_bytes: int = 0


def memory_faults(plan: Plan, max_bytes: int) -> list[Fault]:
    """A fault for each rank that has more than `max_bytes`. The plan must have no other fault."""
    result: list[Fault] = []
    for rank in range(plan.ranks):
        peak, at = _MemoryWalk(plan, rank).peak()
        if peak > max_bytes:
            what = f"keeps {peak:,} bytes, {peak - max_bytes:,} more than the limit of {max_bytes:,}"
            what += f"; with the optimizer's state ({plan.job.optimizer})" if plan.job.trains else ""
            fix = "Use a schedule with fewer live microbatches, smaller microbatches or more stages"
            result.append(MemoryFault(rank, at, what, fix, peak))
    return result


def peak_bytes(plan: Plan, rank: int) -> int:
    """The most bytes that the rank has at any point of its order."""
    return _MemoryWalk(plan, rank).peak()[0]


@dataclass(slots=True)
class _Step:
    """Bytes that come with some ops of a window, and then go, in every run; and what depends on the run: a
    value that others use too, a part of a gradient, gradients that are to be summed. part: whose
    microbatch."""

    up: int = 0
    down: int = 0
    part: int = 0
    partial_sums: tuple[PartialSum, ...] = ()
    lasting: list[Storage] = field(default_factory=list)
    sums: tuple[str, ...] = ()

    def take(self, after: _Step) -> bool:
        """Do what the step after this one does, if neither depends on the run."""
        if (
            self.partial_sums
            or self.lasting
            or self.sums
            or after.partial_sums
            or after.lasting
            or after.sums
        ):
            return False
        end = self.up + self.down
        self.up, end = max(self.up, end, end + after.up), end + after.up + after.down
        self.down = end - self.up
        return True


class _MemoryWalk:
    """One walk over one rank's order, op by op."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.stages = set(plan.schedule.stages_of(rank))
        self.ops: dict[Storage, Op] = {
            (stage, op.name): op
            for stage in self.stages
            for ops in plan.job.stages[stage].ops.values()
            for op in ops
        }
        self.edge_into = {(e.target, e.value): e for e in plan.job.edges if e.target in self.stages}
        self.partial_sums: dict[Storage, tuple[PartialSum, ...]] = {
            (stage, value): of for stage in self.stages for value, of in partial_sums(plan.job, stage).items()
        }
        # By group of tied parameters: the names that the rank has.
        self.tied: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in plan.job.parameters:
            if self.stages.intersection(parameter.stages):
                self.tied[parameter.tied_to].append(parameter)
        self.made: dict[Storage, tuple[tuple[Storage, int], ...]] = {
            (stage, name): tuple(((stage, made), nbytes) for made, nbytes in makes(op))
            for (stage, name), op in self.ops.items()
            if not any(partial_sum.product for partial_sum in self.partial_sums.get((stage, name), ()))
        }
        self.nbytes = dict(made for of_op in self.made.values() for made in of_op)
        self.nbytes |= {at: edge.spec.nbytes for at, edge in self.edge_into.items()}
        self.touched = {at: self.touches(*at) for at in self.ops}
        # What must be done with a storage before it goes: ops that use it, and sends of it.
        self.uses = Counter(storage for touched in self.touched.values() for storage in touched)
        for edge in plan.job.edges:
            if edge.source in self.stages and edge.target not in self.stages:
                self.uses[self.storage(edge.source, edge.value)] += 1
        self.left: dict[tuple[Storage, int], int] = {}
        self.known: dict[str, list[_Step]] = {}
        self.begun: set[str] = set()
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

    def touches(self, stage: int, name: str) -> list[Storage]:
        """The storages that an op makes or reads, those given from outside left out."""
        op = self.ops[stage, name]
        names = [*(made for (_, made), _ in self.made.get((stage, name), ())), *reads(op)]
        if op.target == WAIT:
            names += in_flight(self.ops[stage, op.args[0].name])
        result = [self.storage(stage, one) for one in names if not is_external(one)]
        return [storage for storage in dict.fromkeys(result) if not is_external(storage[1])]

    def peak(self) -> tuple[int, str]:
        """(bytes, the instruction at which they are kept)."""
        kept = sum(parameters[-1].held_nbytes for parameters in self.tied.values())
        trained = {parameter.tied_to for parameter in self.plan.job.parameters if parameter.grads}
        kind = self.plan.job.optimizer
        kept += sum(one[-1].state_nbytes(kind) for name, one in self.tied.items() if name in trained)
        buffers = [b.spec.nbytes for b in self.plan.job.buffers if self.stages.intersection(b.stages)]
        self.keep(kept + sum(buffers), "")
        for instruction in self.plan.orders[self.rank]:
            at = str(instruction)
            if instruction.kind is InstructionKind.RECV:
                self.keep(self.plan.job.edges[int(instruction.ref)].spec.nbytes, at)
            elif instruction.kind is InstructionKind.SENT:
                edge = self.plan.job.edges[int(instruction.ref)]
                self.keep(-self.gone(self.storage(edge.source, edge.value), instruction.microbatches[0]), at)
            else:
                for step in self.steps(str(instruction.ref)):
                    self.run(step, instruction.microbatches, at)
        return self.highest

    def keep(self, nbytes: int, at: str) -> None:
        """So many bytes more are kept from here on."""
        self.level += nbytes
        if self.level > self.highest[0]:
            self.highest = (self.level, at)

    def run(self, step: _Step, microbatches: tuple[int, ...], at: str) -> None:
        up, down = step.up, step.down
        for group in step.sums:
            self.become_one(group, at)
        for partial_sum in step.partial_sums:
            if partial_sum.parameter not in self.begun:
                self.begun.add(partial_sum.parameter)
                # A value that becomes the gradient goes as the gradient comes; a copy is beside it.
                if partial_sum.product or partial_sum.copied:
                    up += partial_sum.nbytes
                else:
                    down += partial_sum.nbytes
        self.keep(up, at)
        self.keep(down - sum(self.gone(storage, microbatches[step.part]) for storage in step.lasting), at)

    def steps(self, name: str) -> list[_Step]:
        """What a window does, op by op; ops in a row that do the same in every run are one step."""
        if name in self.known:
            return self.known[name]
        window = self.plan.windows[name]
        ops = {item: (window.parts[item.part][0], str(item.ref)) for item in window.items}
        left = Counter(
            (storage, item.part)
            for item, op in ops.items()
            if item.kind is ItemKind.OP
            for storage in self.touched[op]
        )
        inside = {key for key, count in left.items() if count == self.uses[key[0]]}
        result = self.known[name] = []
        for item, op in ops.items():
            if item.kind is not ItemKind.OP:
                continue
            step = _Step(sum(nbytes for _, nbytes in self.made.get(op, ())), 0, item.part)
            step.partial_sums = self.partial_sums.get(op, ())
            step.sums = self.ops[op].sums
            for storage in self.touched[op]:
                left[storage, item.part] -= 1
                if (storage, item.part) not in inside:
                    step.lasting.append(storage)
                elif not left[storage, item.part]:
                    step.down -= self.nbytes[storage]
            if not result or not result[-1].take(step):
                result.append(step)
        return result

    def gone(self, storage: Storage, microbatch: int) -> int:
        """Count a use that is over; the bytes that go if it was the last."""
        key = (storage, microbatch)
        left = self.left.pop(key, self.uses[storage]) - 1
        if left:
            self.left[key] = left
        return 0 if left or is_external(storage[1]) else self.nbytes[storage]  # what is given stays

    def become_one(self, group: str, at: str) -> None:
        """Gradients of tied parameters are one before they are summed; where none is, zeros."""
        names = [parameter.name for parameter in self.tied.get(group, ())]  # none of the loss
        begun = self.begun.intersection(names)
        if names and len(begun) != 1:
            nbytes = self.tied[group][-1].grad_nbytes
            self.keep(nbytes, at)
            self.keep(-len(begun) * nbytes, at)
            self.begun -= begun
            self.begun.add(names[0])
