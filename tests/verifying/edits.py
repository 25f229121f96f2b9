"""Edits of a plan by its text: what a case breaks can be read in the case."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stretto.ir.action import Phase
from stretto.ir.plan import Communicator, Instruction, Item, Plan
from stretto.ir.program import WAIT, Op, Ref, Stage, TensorSpec
from stretto.ir.transfers import reduced_bytes

Edit = Callable[[Plan], Plan]


def order(rank: int, old: str, new: str) -> Edit:
    """Replace a part of a rank's order, written as one text with `; ` between instructions."""

    def edit(plan: Plan) -> Plan:
        text = "; ".join(map(str, plan.orders[rank])) + "; "
        assert text.count(old) == 1, text
        changed = [part for part in text.replace(old, new).split("; ") if part]
        orders = [*plan.orders]
        orders[rank] = tuple(map(Instruction.parse, changed))
        return replace(plan, orders=tuple(orders))

    return edit


def window(name: str, old: str, new: str) -> Edit:
    """Replace a part of a window's items, written as one text with `; ` between items."""

    def edit(plan: Plan) -> Plan:
        text = "; ".join(map(str, plan.windows[name].items)) + "; "
        assert text.count(old) == 1, text
        changed = [part for part in text.replace(old, new).split("; ") if part]
        made = replace(plan.windows[name], items=tuple(map(Item.parse, changed)))
        return replace(plan, windows={**plan.windows, name: made})

    return edit


def op(stage: int, name: str, **changes: Any) -> Edit:
    """Change one op."""

    def edit(plan: Plan) -> Plan:
        stages = list(plan.job.stages)
        programs = {
            phase: tuple(replace(o, **changes) if o.name == name else o for o in stages[stage].ops[phase])
            for phase in stages[stage].ops
        }
        assert programs != stages[stage].ops
        stages[stage] = Stage(stage, programs)
        return replace(plan, job=replace(plan.job, stages=tuple(stages)))

    return edit


def parameter(name: str, **changes: Any) -> Edit:
    """Change one parameter."""
    return lambda plan: replace(
        plan,
        job=replace(
            plan.job,
            parameters=tuple(replace(p, **changes) if p.name == name else p for p in plan.job.parameters),
        ),
    )


def job(**changes: Any) -> Edit:
    """Change the job."""
    return lambda plan: replace(plan, job=replace(plan.job, **changes))


def schedule(**changes: Any) -> Edit:
    """Change the schedule."""
    return lambda plan: replace(plan, schedule=replace(plan.schedule, **changes))


def costs(**changes: Any) -> Edit:
    """Change the costs."""
    return lambda plan: replace(plan, costs=replace(plan.costs, **changes))


def communicators(*wanted: Communicator) -> Edit:
    """Change the list of communicators."""
    return lambda plan: replace(plan, communicators=wanted)


def summing(plan: Plan, start: Op, groups: Sequence[str], lane: str = "") -> Op:
    """The op with other gradients, or on another communicator; in all else as it has to be."""
    lane = lane or start.lane
    kept = [p for group in groups for p in plan.job.parameters if p.name == group]
    found = next(found for found in plan.communicators if found.name == lane)
    size = math.prod([len(found.ranks), *(plan.mesh.size(axis) for axis in found.axes[1:])])
    nbytes = sum(reduced_bytes(plan.job, parameter, lane) for parameter in kept)
    alone = len(kept) == 1 and nbytes == kept[0].grad_nbytes
    return replace(
        start,
        args=(tuple(Ref(f"grad/{group}") for group in groups), "sum", lane, size),
        outputs=(TensorSpec((nbytes // 4,), "float32"),),
        alias=f"grad/{groups[0]}" if alone else None,
    )


def with_sum(plan: Plan, new: Op) -> Plan:
    """The plan whose start of a sum, and the wait for it, are others; both keep their names."""
    stages = []
    for stage in plan.job.stages:
        ops = []
        for op in stage.ops.get(Phase.REDUCE_GRAD, ()):
            waits = op.target == WAIT and op.uses == (new.name,)
            ops.append(replace(op, outputs=new.outputs) if waits else new if op.name == new.name else op)
        stages.append(Stage(stage.index, {**stage.ops, Phase.REDUCE_GRAD: tuple(ops)}))
    return replace(plan, job=replace(plan.job, stages=tuple(stages)))


def sums(name: str, *groups: str, lane: str = "") -> Edit:
    """Let a sum be of other gradients, or on another communicator."""

    def edit(plan: Plan) -> Plan:
        [start] = {op for rank in range(plan.ranks) for op in plan.sums(rank) if op.name == name}
        return with_sum(plan, summing(plan, start, groups or start.sums, lane))

    return edit


def communicator(name: str, **changes: Any) -> Edit:
    """Change one communicator."""
    return lambda plan: replace(
        plan,
        communicators=tuple(replace(c, **changes) if c.name == name else c for c in plan.communicators),
    )


def both(*edits: Edit) -> Edit:
    """Several edits, one after the other."""

    def edit(plan: Plan) -> Plan:
        for one in edits:
            plan = one(plan)
        return plan

    return edit
