"""Edits of a plan by its text: what a case breaks can be read in the case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stretto.ir.action import Phase
from stretto.ir.plan import Communicator, Instruction, Item, Plan
from stretto.ir.program import Op, Ref, Stage

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


def once(stage: int, change: Callable[[tuple[Op, ...]], Sequence[Op]]) -> Edit:
    """Change the program of what a stage's rank does once a step."""

    def edit(plan: Plan) -> Plan:
        stages = list(plan.job.stages)
        before = stages[stage].ops[Phase.REDUCE_GRAD]
        after = tuple(change(before))
        assert after != before
        stages[stage] = Stage(stage, {**stages[stage].ops, Phase.REDUCE_GRAD: after})
        return replace(plan, job=replace(plan.job, stages=tuple(stages)))

    return edit


def reading(start: Op, value: str, lane: str = "", size: int = 0) -> Op:
    """A sum in place of another value, or on another communicator."""
    args = Ref(value), "sum", lane or start.lane, size or start.args[-1]
    return replace(start, args=args, alias=value)


def sums(stage: int, name: str, value: str = "", lane: str = "", size: int = 0) -> Edit:
    """Let a sum that is in place be of another gradient, or on another communicator; its wait follows."""

    def change(ops: tuple[Op, ...]) -> list[Op]:
        found = []
        for op in ops:
            if op.name == name:
                op = reading(op, value or op.uses[0], lane, size)
            elif op.uses == (name,) and value:
                op = replace(op, alias=value, writes=(value,))
            found.append(op)
        return found

    return once(stage, change)


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
