"""The memory of one rank: what is allocated when, and when it goes; and the proof that it suffices.

What a rank keeps follows from the order of its program alone, whatever the times are. The simulation walks
this same count, and says when (`stretto.simulating.engine`). In bytes:

1. Parameters (one copy a rank, or the most rows that a rank keeps, `stretto.ir.kept`), buffers and the
   optimizer's state are kept throughout. Batch leaves, constants and the tangent are not counted.
2. An op's results exist from the op's start, each to the end of its last use by any program of the rank for
   that microbatch. A view keeps the result that it belongs to; so does the wait for a collective, whose
   result is that of the op that starts it. What is gathered or scattered exists until the wait as well.
3. A receive's buffer exists from the post to its last use. What is sent exists until `sent` as well.
4. A parameter's gradient exists from the first op that adds to it to the end of the step; the first
   contribution becomes the gradient or is copied, later ones go as soon as they are added. A product that is
   added while it is multiplied has no bytes but those of a gradient that it begins
   (`stretto.ir.storage`).
5. What lives over the step is replaced by what an op that names it in `writes` makes. A gradient to which
   the rank adds nothing begins when an op reads it.

Not counted: workspaces and the allocator's waste.

What one window does to memory depends only on which of the values that outlive a window end in it, so
each such case is worked out once, stretch by stretch of its items, relative to the window's start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from stretto.ir.action import ONCE_PHASES, Phase
from stretto.ir.flow import PHASES, is_external
from stretto.ir.kept import added_spec, parameter_nbytes, state_nbytes
from stretto.ir.plan import Instruction, InstructionKind, ItemKind, Plan, Window
from stretto.ir.program import GRAD, PARAM, STEP_LOSS, STEP_NORM, WAIT, Job, Op
from stretto.ir.storage import PartialSum, in_flight, makes, owner, partial_sums, reads
from stretto.verifying.fault import Fault

Program = tuple[int, Phase | str]
"""(stage, F | I | W), or of what runs once a step, whose ops are in several windows, (stage, op)."""


@dataclass(slots=True)
class Storage:
    """Memory that one op, or one receive, allocates for each microbatch."""

    nbytes: int
    users: set[Program] = field(default_factory=set)
    sends: set[int] = field(default_factory=set)
    group: int = -1


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Storages with the same users and sends: they end in the same run, or with the same `sent`."""

    users: frozenset[Program]
    sends: frozenset[int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """What a stretch does to the bytes kept: the highest on the way, where (0 to 1), and at the end."""

    peak: int
    at: float
    end: int


def bytes_throughout(job: Job, stages: Collection[int]) -> dict[str, int]:
    """What a rank with these stages has throughout: "parameters" (with buffers), and "optimizer"."""
    trained = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    kept = {p.tied_to: p for p in job.parameters if any(stage in stages for stage in p.stages)}
    buffers = (b for b in job.buffers if any(stage in stages for stage in b.stages))
    own = [parameter for name, parameter in kept.items() if name in trained]
    parameters = sum(parameter_nbytes(job, p) for p in kept.values())
    return {
        "parameters": parameters + sum(b.spec.nbytes for b in buffers),
        "optimizer": sum(state_nbytes(job, p) for p in own),
    }


def memory_parts(plan: Plan, peak_bytes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Of what peaks consist, by rank: `bytes_throughout`; what is made of parameters for a step, and
    "gradients", as many as there are when they are the most together; and as "activations" all else: results
    of ops, buffers of messages, gradients on their way into a sum or between ranks."""
    ranks: list[dict[str, int]] = []
    for rank, peak in enumerate(peak_bytes):
        kept = bytes_throughout(plan.job, plan.schedule.stages_of(rank))
        memory = RankMemory(plan, rank)
        for _ in memory.peaks():
            pass
        made, kept["gradients"] = memory.most_over_step
        kept["parameters"] += made
        kept["activations"] = peak - sum(kept.values())
        ranks.append(kept)
    return {part: tuple(kept[part] for kept in ranks) for part in ranks[0]}


class RankMemory:
    """Bytes kept on one rank, walked in the order of its instructions."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._stages = plan.schedule.stages_of(rank)
        self._ops: dict[tuple[int, str], tuple[Op, Phase]] = {
            (stage, op.name): (op, phase)
            for stage in self._stages
            for phase in (*PHASES, *ONCE_PHASES)
            for op in plan.job.stages[stage].ops.get(phase, ())
        }
        self._edges_into = {
            (edge.target, edge.value): edge for edge in plan.job.edges if edge.target in self._stages
        }
        self._roots: dict[tuple[int, str], Storage | None] = {}
        self._received: dict[int, Storage] = {}
        self._touched: dict[tuple[int, str], tuple[Storage, ...]] = {}
        self._partial_sums: dict[tuple[int, str], tuple[PartialSum, ...]] = {
            (stage, value): of
            for stage in self._stages
            for value, of in partial_sums(plan.job, stage).items()
        }
        self._made: dict[tuple[int, str], int] = {}
        self._find_lifetimes()
        self._groups = self._make_groups()
        self._groups_of_program: dict[Program, list[int]] = defaultdict(list)
        self._groups_of_send: dict[int, list[int]] = defaultdict(list)
        for index, group in enumerate(self._groups):
            for program in sorted(group.users):
                self._groups_of_program[program].append(index)
            for edge_index in group.sends:
                self._groups_of_send[edge_index].append(index)
        self._grad_names: dict[Program, list[str]] = defaultdict(list)
        self._over_step: dict[str, int] = {}
        """Gradient, or parameter that is made -> its bytes, from when it begins."""
        self._lives = self.most_over_step = (0, 0)
        """Bytes of parameters that are made and of gradients: now, and when they were the most together."""
        self._grad_nbytes = {
            GRAD + parameter.name: added_spec(plan.job, parameter).nbytes for parameter in plan.job.parameters
        }
        for parameter in plan.job.parameters:
            for stage, phase, _ in parameter.grads:
                if stage in self._stages:
                    self._grad_names[stage, phase].append(GRAD + parameter.name)
        throughout = bytes_throughout(plan.job, self._stages)
        self.bytes_held = throughout["parameters"] + throughout["optimizer"]
        self._remaining: dict[tuple[int, int], int] = {}
        self._cache: dict[tuple[object, ...], tuple[Change | None, ...]] = {}

    def _root(self, stage: int, name: str) -> Storage | None:
        """The storage that a value is in; None for what is not counted."""
        key = (stage, name)
        if key in self._roots:
            return self._roots[key]
        result: Storage | None = None
        edge = self._edges_into.get(key)
        if key in self._ops:
            op, _ = self._ops[key]
            lies_in = owner(op)
            result = self._root(stage, lies_in) if lies_in != name else None
        elif edge is not None and edge.source in self._stages:
            result = self._root(edge.source, name)
        elif edge is not None:
            result = self._received.setdefault(edge.index, Storage(edge.spec.nbytes))
        self._roots[key] = result
        return result

    def _find_lifetimes(self) -> None:
        for (stage, name), (op, _) in self._ops.items():
            product = any(partial_sum.product for partial_sum in self._partial_sums.get((stage, name), ()))
            made = {} if product else {(stage, made): Storage(nbytes) for made, nbytes in makes(op)}
            self._roots.update(made)
            self._made[stage, name] = sum(storage.nbytes for storage in made.values())
        for (stage, name), (op, phase) in self._ops.items():
            read = reads(op)
            if op.target == WAIT and (stage, op.uses[0]) in self._ops:
                start, _ = self._ops[stage, op.uses[0]]
                read = (*read, *in_flight(start))
            used = (*(made for made, _ in makes(op)), *(use for use in read if not is_external(use)))
            roots = (self._root(stage, one) for one in used)
            touched = tuple(root for root in roots if root is not None)
            self._touched[stage, name] = touched
            for root in touched:
                root.users.add((stage, name if phase in ONCE_PHASES else phase))
        for edge in self._plan.job.edges:
            if edge.source in self._stages and edge.target not in self._stages:
                storage = self._root(edge.source, edge.value)
                if storage is not None:
                    storage.sends.add(edge.index)

    def _make_groups(self) -> list[MemoryGroup]:
        index_of: dict[tuple[frozenset[Program], frozenset[int]], int] = {}
        nbytes: list[int] = []
        seen: set[int] = set()
        for storage in (*self._roots.values(), *self._received.values()):
            if storage is None or id(storage) in seen:
                continue
            seen.add(id(storage))
            key = (frozenset(storage.users), frozenset(storage.sends))
            storage.group = index_of.setdefault(key, len(index_of))
            if storage.group == len(nbytes):
                nbytes.append(0)
            nbytes[storage.group] += storage.nbytes
        return [MemoryGroup(*key, nbytes[index]) for key, index in index_of.items()]

    def post(self, edge: int) -> None:
        """Step 3: a receive is posted."""
        self.bytes_held += self._plan.job.edges[edge].spec.nbytes

    def sent(self, edge: int, microbatch: int) -> None:
        """Step 3: a message has left; what only it kept goes."""
        for group in self._groups_of_send[edge]:
            if self._use(group, microbatch):
                self.bytes_held -= self._groups[group].nbytes

    def run(
        self,
        window: Window,
        microbatches: tuple[int, ...],
        stretches: Sequence[range],
        op_us: Sequence[float],
    ) -> tuple[Change | None, ...]:
        """What stretches of the window's items do to the bytes kept, in order (None: nothing); the caller
        applies each when it runs. No item between them is an op. op_us: by item."""
        ending: set[tuple[int, int]] = set()
        # A window may run one program for two microbatches.
        programs: list[tuple[Program, int]] = [
            ((stage, sub), microbatch)
            for (stage, phase), microbatch in zip(window.parts, microbatches, strict=True)
            for sub in phase.programs
        ]
        if len(window.actions) < len(window.parts):
            once = (item for item in window.items if item.part not in window.actions)
            programs += [((window.parts[i.part][0], str(i.ref)), microbatches[i.part]) for i in once]
        for program, microbatch in programs:
            for group in self._groups_of_program[program]:
                if self._use(group, microbatch):
                    ending.add((group, microbatch))
        first = {
            name
            for program, _ in programs
            for name in self._grad_names[program]
            if name not in self._over_step
        }
        self._over_step.update((name, self._grad_nbytes[name]) for name in first)
        # Only which parts share a microbatch matters, not which one it is.
        shape = tuple(microbatches.index(microbatch) for microbatch in microbatches)
        ends = frozenset((group, microbatches.index(microbatch)) for group, microbatch in ending)
        key = (window.name, shape, ends, frozenset(first))
        if key not in self._cache:
            self._cache[key] = self._changes(window, shape, ends, first, stretches, op_us)
        return self._cache[key]

    def _use(self, group: int, microbatch: int) -> bool:
        """Count one use of a group for a microbatch; True when it was the last."""
        key = (group, microbatch)
        of = self._groups[group]
        left = self._remaining.get(key, len(of.users) + len(of.sends)) - 1
        if left:
            self._remaining[key] = left
            return False
        self._remaining.pop(key, None)
        return True

    def _changes(
        self,
        window: Window,
        shape: tuple[int, ...],
        ends: frozenset[tuple[int, int]],
        first: set[str],
        stretches: Sequence[range],
        op_us: Sequence[float],
    ) -> tuple[Change | None, ...]:
        ops = [
            (window.parts[item.part][0], str(item.ref)) if item.kind is ItemKind.OP else (-1, "")
            for item in window.items
        ]
        last_use: dict[tuple[int, int], tuple[int, int]] = {}
        for at, item in enumerate(window.items):
            for storage in self._touched.get(ops[at], ()):
                if (storage.group, shape[item.part]) in ends:
                    last_use[id(storage), shape[item.part]] = (at, storage.nbytes)
        freed: dict[int, int] = defaultdict(int)
        for at, nbytes in last_use.values():
            freed[at] += nbytes

        changes: list[Change | None] = []
        for stretch in stretches:
            level = peak = 0
            at_us = peak_us = 0.0
            for at in stretch:
                level += self._made.get(ops[at], 0)
                begun = 0
                if window.items[at].part not in window.actions:
                    level += self._read_over_step(ops[at])
                    begun = self._written(ops[at])
                for partial_sum in self._partial_sums.get(ops[at], ()):
                    if GRAD + partial_sum.parameter in first:
                        first.discard(GRAD + partial_sum.parameter)
                        self._grows(gradients=partial_sum.nbytes)
                        # What becomes the gradient goes as the gradient comes; a copy waits beside it.
                        if partial_sum.product or partial_sum.copied:
                            level += partial_sum.nbytes
                        else:
                            begun += partial_sum.nbytes
                if level > peak:
                    peak, peak_us = level, at_us
                at_us += op_us[at]
                level += begun - freed[at]
                if level > peak:
                    peak, peak_us = level, at_us
            change = Change(peak, peak_us / at_us if at_us else 0.0, level)
            changes.append(change if peak or level else None)
        return tuple(changes)

    def _read_over_step(self, key: tuple[int, str]) -> int:
        """Step 5: bytes of gradients that begin because an op of what runs once a step reads them."""
        op, _ = self._ops[key]
        begun = {
            n: self._grad_nbytes[n] for n in op.uses if n in self._grad_nbytes and n not in self._over_step
        }
        self._over_step.update(begun)
        self._grows(gradients=sum(begun.values()))
        return sum(begun.values())

    def _written(self, key: tuple[int, str]) -> int:
        """Step 5: bytes of what the op changes, less those that it had."""
        op, _ = self._ops[key]
        total = 0
        now = sum(spec.nbytes for spec in op.outputs if spec is not None)
        for name in op.writes:  # an update makes nothing
            if name not in (STEP_LOSS, STEP_NORM):
                more = now - self._over_step.get(name, 0)
                self._over_step[name] = now
                self._grows(**{"made" if name.startswith(PARAM) else "gradients": more})
                total += more
        return total

    def _grows(self, made: int = 0, gradients: int = 0) -> None:
        """What lives over the step has so many bytes more."""
        self._lives = (self._lives[0] + made, self._lives[1] + gradients)
        self.most_over_step = max(self.most_over_step, self._lives, key=sum)

    def peaks(self) -> Iterator[tuple[int, Instruction]]:
        """The instructions of the rank in order, each with the most bytes that the rank has meanwhile."""
        for instruction in self._plan.orders[self._rank]:
            peak = 0
            if instruction.kind is InstructionKind.RECV:
                self.post(int(instruction.ref))
            elif instruction.kind is InstructionKind.SENT:
                self.sent(int(instruction.ref), instruction.microbatches[0])
            else:
                window = self._plan.windows[str(instruction.ref)]
                count = len(window.items)
                [change] = self.run(window, instruction.microbatches, [range(count)], [0.0] * count)
                if change is not None:
                    peak = self.bytes_held + change.peak
                    self.bytes_held += change.end
            yield max(peak, self.bytes_held), instruction


@dataclass(frozen=True, slots=True)
class MemoryFault(Fault):
    """A rank that has more than it may. holds_bytes: the most at any point of its order."""

    holds_bytes: int = 0


def memory_faults(plan: Plan, max_bytes: int) -> list[Fault]:
    """A fault for each rank that has more than `max_bytes`. The plan must have no other fault."""
    result: list[Fault] = []
    for rank in range(plan.ranks):
        peak, at = _peak(plan, rank)
        if peak > max_bytes:
            what = f"keeps {peak:,} bytes, {peak - max_bytes:,} more than the limit of {max_bytes:,}"
            what += f"; with the optimizer's state ({plan.job.optimizer})" if plan.job.trains else ""
            fix = "Use a schedule with fewer live microbatches, smaller microbatches or more stages"
            result.append(MemoryFault(rank, at, what, fix, peak))
    return result


def peak_bytes(plan: Plan, rank: int) -> int:
    """The most bytes that the rank has at any point of its order."""
    return _peak(plan, rank)[0]


def _peak(plan: Plan, rank: int) -> tuple[int, str]:
    """(bytes, the instruction at which they are kept)."""
    peaks = instruction_peaks(plan, rank)
    peak, at = max(peaks, key=lambda one: one[0], default=(0, ""))
    return peak, str(at)


def instruction_peaks(plan: Plan, rank: int) -> Iterator[tuple[int, Instruction]]:
    """The instructions of the rank in order, each with the most bytes that the rank has meanwhile."""
    return RankMemory(plan, rank).peaks()
