"""Edits of a plan by its text: what a case breaks can be read in the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from stretto.ir.flow import PHASES
from stretto.ir.plan import Instruction, Item, Plan
from stretto.ir.program import Stage

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
            for phase in PHASES
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


def bucket(name: str, **changes: Any) -> Edit:
    """Change one bucket."""
    return lambda plan: replace(
        plan, buckets=tuple(replace(b, **changes) if b.name == name else b for b in plan.buckets)
    )


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
