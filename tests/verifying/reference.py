"""A plan walked on all ranks of its run at once, on an imagined machine without mercy: what a plan computes.

Shares no code with `stretto.verify`. A plan is right if every rank reaches its end, nothing is left under
way, and losses and gradients are those of its job (`tests.verifying.meaning`). The machine:

    * a message waits for its receive: a send is over when the receive of the same number on its communicator
      is posted, and what was sent lands in that buffer, whatever it is called;
    * a collective's result is there when every member of its group has started it, in one order;
    * of the collectives that join pipeline ranks, a rank carries on one at a time, in the order in
      which it started them, as on a device that has one;
    * a value is there after the op, the wait or the send that makes it, and nothing else may touch a
      collective's buffer or a gradient while it is being summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from stretto.ir.action import Phase
from stretto.ir.flow import is_external
from stretto.ir.plan import Instruction, InstructionKind, Item, ItemKind, Plan
from stretto.ir.program import STARTS, STEP_LOSS, WAIT, Op
from tests.verifying.machine import Machine, Pending, Rank, WrongPlanError
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
                self.adds[stage, value].append(parameter.tied_to)

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
            found["loss", rank.rank, ""] = (rank.loss if rank.heard is None else rank.heard) % PRIME
            for parameter in self.job.parameters:
                has = any(self.plan.rank_of(s) == rank.at["pp"] for s in parameter.stages)
                if has and any(p.tied_to == parameter.tied_to and p.grads for p in self.job.parameters):
                    value = rank.grads.get(parameter.tied_to, 0)
                    found["grad", rank.rank, parameter.tied_to] = value % PRIME
        return found

    def at_rest(self, rank: Rank) -> None:
        """Nothing of the step goes on after its end."""
        if rank.sent.keys() != rank.left:
            raise WrongPlanError(f"rank {rank.rank} does not wait for all that it sends")
        if rank.posted.keys() != rank.taken:
            raise WrongPlanError(f"rank {rank.rank} receives what it never uses")
        if rank.under_way or rank.busy:
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
                raise WrongPlanError("sums are of the step, and of no microbatch")
            yield from self.sum(rank, stage, item)
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
            if gradient in rank.busy or isinstance(result, Pending):
                raise WrongPlanError(f"{name} adds to {gradient} while it is summed")
            rank.grads[gradient] = rank.grads.get(gradient, 0) + result
        if (stage, name) == self.job.loss and group == "F":
            assert isinstance(result, int)
            if STEP_LOSS in rank.busy or rank.heard is not None:
                raise WrongPlanError("the loss is summed before all of it is there")
            rank.loss += result

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

    # --- what is summed once a step -----------------------------------------------------------------

    def sum(self, rank: Rank, stage: int, item: Item) -> Iterator[str]:
        ops = {op.name: op for op in self.job.stages[stage].ops.get(Phase.REDUCE_GRAD, ())}
        op = ops.get(str(item.ref))
        if op is None or item.kind is not ItemKind.OP or self.plan.rank_of(stage) != rank.at["pp"]:
            raise WrongPlanError(f"stage {stage} has no sum {item.ref} on rank {rank.rank}")
        start = ops[op.args[0].name] if op.target == WAIT else op
        names = [ref.name.removeprefix("grad/") for ref in start.args[0]]
        if op.target == WAIT:
            if op.args[0].name not in rank.sums:
                raise WrongPlanError(f"{start.name} is not being summed")
            parts = yield from self.finish(rank, rank.sums[start.name])
            for name, values in zip(names, zip(*parts, strict=True), strict=True):  # type: ignore[call-overload]
                rank.busy.pop(name, None)
                if name == STEP_LOSS:
                    rank.heard = sum(values)
                else:
                    rank.grads[name] = sum(values)
            return
        if start.name in rank.sums:
            raise WrongPlanError(f"{start.name} is summed twice")
        for name in names:
            if name in rank.busy:
                raise WrongPlanError(f"{name} is in two sums at once")
            rank.busy[name] = start.name
        given = tuple(rank.loss if name == STEP_LOSS else rank.grads.get(name, 0) for name in names)
        what = start.name, *names
        rank.sums[start.name] = self.start(rank, start.lane, what, given)  # type: ignore[arg-type]
        if len(self.members(rank.sums[start.name])) != start.args[-1]:
            raise WrongPlanError(f"{start.name} is for {start.args[-1]} ranks")
