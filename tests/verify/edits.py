"""Edits of a plan by its text: what a case breaks can be read in the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stretto.ir.plan import Instruction, Item, Plan

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
