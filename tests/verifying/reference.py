"""A plan walked on all ranks of its run at once, on an imagined machine without mercy: what a plan computes.

Shares no code with `stretto.verify`. A plan is right if every rank reaches its end, nothing is left under
way, and losses and gradients are those of its job (`tests.verifying.meaning`). The machine:

    * a message waits for its receive: a send is over when the receive of the same number on its communicator
      is posted, and what was sent lands in that buffer, whatever it is called;
    * a collective's result is there when every member of its group has started it, in one order;
    * of the collectives that join pipeline ranks, a rank carries on one at a time, in the order in
      which it started them, as on a device that has one;
    * a value is there after the op, the wait or the send that makes it, and nothing else may touch a
      collective's buffer while it is being filled;
    * what lives over the step has memory: actions add to it, programs that run once a step read it, and put
      what they name it in its place; a collective that works in place makes the memory its buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.flow import is_external
from stretto.ir.plan import Instruction, InstructionKind, Item, ItemKind, Plan
from stretto.ir.program import FREE, GETITEM, STARTS, STEP_LOSS, VIEW, WAIT, Op
from tests.verifying.machine import Machine, Pending, Place, Rank, WrongPlanError, placed
from tests.verifying.meaning import PRIME, Results, combined, computed, external


def runs(plan: Plan) -> Results:
    """Loss and gradients of every rank. Raises WrongPlanError."""
    return _World(plan).run()


class _World(Machine):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.programs: dict[tuple[int, str], dict[str, Op]] = {
            (stage.index, group): {op.name: op for phase in phases for op in stage.ops[phase]}
            for stage in self.job.stages
            for group, phases in (("F", (Phase.F,)), ("B", (Phase.I, Phase.W)))
        }
        self.adds: dict[tuple[int, str], list[str]] = defaultdict(list)
        for parameter in self.job.parameters:
            for stage, _, value in parameter.grads:
                self.adds[stage, value].append(f"grad/{parameter.name}")
        self.elements = {f"grad/{p.name}": p.spec.numel for p in self.job.parameters} | {STEP_LOSS: 1}

    def run(self) -> Results:
        walks = {rank.rank: self.walk(rank) for rank in self.ranks}
        while walks:
            before = self.steps
            for rank, walk in list(walks.items()):
                if next(walk, "end") == "end":
                    del walks[rank]
                    self.steps += 1
            if self.steps == before:
                raise WrongPlanError(f"ranks {sorted(walks)} wait forever")
        found: Results = {}
        for rank in self.ranks:
            self.at_rest(rank)
            found["loss", rank.rank, ""] = self.over_step(rank, STEP_LOSS).read()[0] % PRIME
            for parameter in self.job.parameters:
                has = any(self.plan.rank_of(s) == rank.at["pp"] for s in parameter.stages)
                if has and any(p.tied_to == parameter.tied_to and p.grads for p in self.job.parameters):
                    tie = [f"grad/{p.name}" for p in self.job.parameters if p.tied_to == parameter.tied_to]
                    value = sum(self.over_step(rank, name).read()[0] for name in tie)
                    found["grad", rank.rank, parameter.tied_to] = value % PRIME
        return found

    def at_rest(self, rank: Rank) -> None:
        """Nothing of the step goes on after its end."""
        if rank.sent.keys() != rank.left:
            raise WrongPlanError(f"rank {rank.rank} does not wait for all that it sends")
        if rank.posted.keys() != rank.taken:
            raise WrongPlanError(f"rank {rank.rank} receives what it never uses")
        if rank.under_way:
            raise WrongPlanError(f"rank {rank.rank} ends while a collective is under way")

    def walk(self, rank: Rank) -> Iterator[str]:
        """One rank's order; gives what it waits for, as long as it does."""
        for instruction in self.plan.orders[rank.at["pp"]]:
            kind, ref = instruction.kind, instruction.ref
            if kind is InstructionKind.RUN:
                for item in self.plan.windows[str(ref)].items:
                    yield from self.item(rank, instruction, item)
            elif kind is InstructionKind.RECV:
                self.post(rank, (int(ref), instruction.microbatches[0]))
            else:
                yield from self.gone(rank, (int(ref), instruction.microbatches[0]))
            self.steps += 1

    # --- ops ----------------------------------------------------------------------------------------

    def item(self, rank: Rank, run: Instruction, item: Item) -> Iterator[str]:
        stage, phase = self.plan.windows[str(run.ref)].parts[item.part]
        microbatch = run.microbatches[item.part]
        if phase is Phase.REDUCE_GRAD:
            if microbatch != -1:
                raise WrongPlanError("what runs once a step is of no microbatch")
            yield from self.once(rank, stage, item)
            return
        if self.plan.rank_of(stage) != rank.at["pp"] or not 0 <= microbatch < self.job.microbatches:
            raise WrongPlanError(f"rank {rank.rank} has no stage {stage} or microbatch {microbatch}")
        group = "F" if phase is Phase.F else "B"
        if item.kind is not ItemKind.OP:
            edge = self.job.edges[int(item.ref)]
            if item.kind is ItemKind.WAIT:
                yield from self.arrive(rank, stage, (edge.index, microbatch))
            else:
                value = self.read(rank, stage, microbatch, group, edge.value)
                self.send(rank, (edge.index, microbatch), value)
            return
        name = str(item.ref)
        own = {op.name for sub in phase.programs for op in self.job.stages[stage].ops[sub]}
        if name not in own:
            raise WrongPlanError(f"stage {stage} has no op {name} in {phase}")
        op = self.programs[stage, group][name]
        key = (stage, microbatch, group, name)
        result: int | Pending
        if op.target in STARTS:
            sent = self.read(rank, stage, microbatch, group, op.args[0].name)
            collective = self.start(rank, str(op.args[-2]), (stage, microbatch, name), sent)
            if len(self.members(collective)) != op.args[-1]:
                raise WrongPlanError(f"{name} is for {op.args[-1]} ranks")
            result = Pending(collective, op.target.removeprefix("comm."))
        elif op.target == WAIT:
            pending = self.find(rank, stage, microbatch, group, op.args[0].name)
            if not isinstance(pending, Pending):
                raise WrongPlanError(f"{name} waits for what is no collective")
            parts = yield from self.finish(rank, pending.collective)
            result = combined(pending.kind, parts, self.members(pending.collective).index(rank.rank))
        else:
            reads = [self.read(rank, stage, microbatch, group, use) for use in op.uses]
            result = computed(op, reads, rank.at, microbatch)
        rank.values[key] = result
        for gradient in self.adds.get((stage, name), ()) if group == "B" else ():
            self.add(rank, gradient, result)
        if (stage, name) == self.job.loss and group == "F":
            self.add(rank, STEP_LOSS, result)

    def find(self, rank: Rank, stage: int, microbatch: int, group: str, name: str) -> int | Pending:
        for made in ("B", "F") if group == "B" else ("F",):
            if (stage, microbatch, made, name) in rank.values:
                return rank.values[stage, microbatch, made, name]
        if (stage, microbatch, name) in rank.arrived:
            return rank.arrived[stage, microbatch, name]
        raise WrongPlanError(
            f"rank {rank.rank} does not have {name} of microbatch {microbatch} in stage {stage}"
        )

    def read(self, rank: Rank, stage: int, microbatch: int, group: str, name: str) -> int:
        if is_external(name):
            return external(self.job, name, rank.at, microbatch)
        found = self.find(rank, stage, microbatch, group, name)
        if isinstance(found, Pending):
            raise WrongPlanError(f"{name} is read while it is being filled")
        return found

    # --- what runs once a step ----------------------------------------------------------------------

    def over_step(self, rank: Rank, name: str) -> Place:
        if name not in rank.step:
            rank.step[name] = placed([0], [self.elements[name]])
        return rank.step[name]

    def add(self, rank: Rank, name: str, value: int | Pending) -> None:
        if isinstance(value, Pending):
            raise WrongPlanError(f"what is being filled is added to {name}")
        place = self.over_step(rank, name)
        [before] = place.read()
        place.memory.numbers[place.at[0]] = before + value

    def place(self, rank: Rank, name: str) -> Place:
        """Where a value is."""
        if name in self.elements:
            return self.over_step(rank, name)
        found = rank.once.get(name)
        if not isinstance(found, Place):
            raise WrongPlanError(f"rank {rank.rank} does not have {name}, or it is being filled")
        return found

    def once(self, rank: Rank, stage: int, item: Item) -> Iterator[str]:
        ops = {op.name: op for op in self.job.stages[stage].ops.get(Phase.REDUCE_GRAD, ())}
        op = ops.get(str(item.ref))
        if op is None or item.kind is not ItemKind.OP or self.plan.rank_of(stage) != rank.at["pp"]:
            raise WrongPlanError(f"stage {stage} runs no {item.ref} on rank {rank.rank} once a step")
        if op.name in rank.once:
            raise WrongPlanError(f"{op.name} runs twice")
        if op.target == WAIT:
            result: Place | Pending = yield from self.summed(rank, op)
        elif op.target == "comm.all_reduce":
            result = self.sum(rank, op)
        else:
            result = self.made(op, [self.place(rank, name) for name in op.uses])
        rank.once[op.name] = result
        if op.target == FREE:
            for name in op.writes:
                rank.step.pop(name, None)
            return
        for name in op.writes:
            assert isinstance(result, Place)
            if name in rank.step:
                rank.step[name].read()
            if result.elements != [self.elements[name]]:
                raise WrongPlanError(f"{op.name} is not of the size of {name}")
            rank.step[name] = result

    def sum(self, rank: Rank, op: Op) -> Pending:
        source = self.place(rank, op.uses[0])
        given, elements = source.read(), source.elements
        place = source if op.alias is not None else placed(given, elements)
        collective = self.start(rank, op.lane, (op.name, op.args[1], tuple(elements)), given)
        if len(self.members(collective)) != op.args[-1] or op.args[1] != "sum":
            raise WrongPlanError(f"{op.name} is for {op.args[-1]} ranks, or no sum")
        place.memory.filling = op.name
        return Pending(collective, "all_reduce", place)

    def summed(self, rank: Rank, op: Op) -> Iterator[str]:
        """The place of a sum, when it is there."""
        pending = rank.once.get(op.uses[0])
        if not isinstance(pending, Pending) or pending.place is None:
            raise WrongPlanError(f"{op.uses[0]} is not being summed")
        parts = yield from self.finish(rank, pending.collective)
        pending.place.memory.filling = ""
        for k, numbers in zip(pending.place.at, zip(*parts, strict=True), strict=True):  # type: ignore[call-overload]
            pending.place.memory.numbers[k] = sum(numbers)
        return pending.place  # type: ignore[return-value]

    def made(self, op: Op, given: list[Place]) -> Place:
        """By an op of PyTorch, of what is at these places."""
        numbers = [place.read() for place in given]
        if op.target == "aten._chunk_cat.default":
            elements = [each for place in given for each in place.elements]
            return placed([number for one in numbers for number in one], elements)
        if op.target == "aten.split_with_sizes.default":
            if list(op.args[1]) != given[0].elements:
                raise WrongPlanError(f"{op.name} cuts elsewhere than between gradients")
            return given[0]
        if op.target == GETITEM:
            return Place(given[0].memory, (given[0].at[op.args[1]],))
        if op.target == VIEW:
            return given[0]
        if op.target == "aten.add.Tensor":
            return placed([sum(one) for one in zip(*numbers, strict=True)], given[0].elements)
        if op.target == FREE:
            return placed([], [])
        raise WrongPlanError(f"{op.name}: {op.target} is no part of a reduction")
