"""Parameters that a program makes are read between what makes and what frees them, or a plan is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from stretto.ir.action import AFTER, BEFORE
from stretto.ir.plan import Item, ItemKind, Plan, Window
from stretto.ir.program import FREE, GRAD, PARAM, Op, Stage
from stretto.verifying import plan_faults
from tests.parallelize.zero import ZeroCell

Moved = Callable[[Plan, Window, list[Item]], list[Item]]


@cache
def plan() -> Plan:
    """Rows that two stages keep."""
    return ZeroCell(1, pp=2, tied=True).plan()


def reordered(name: str, move: Moved) -> Plan:
    """A plan with the items of one window in another order."""
    given = plan()
    window = given.windows[name]
    items = move(given, window, list(window.items))
    assert items != list(window.items)
    return replace(given, windows={**given.windows, name: replace(window, items=tuple(items))})


def window_with(phase: object) -> str:
    """A window of actions in which ops of this program run."""
    return next(n for n, w in plan().windows.items() if w.actions and phase in {p for _, p in w.parts})


def program(given: Plan, phase: object) -> Sequence[Op]:
    return [op for stage in given.job.stages for op in stage.ops.get(phase, ())]  # type: ignore[call-overload]


def to_the_end(given: Plan, window: Window, items: list[Item]) -> list[Item]:
    """What waits for a gather comes after all that reads the parameters."""
    late = [item for item in items if window.parts[item.part][1] is BEFORE]
    return [*(item for item in items if item not in late), *late]


def to_the_begin(given: Plan, window: Window, items: list[Item]) -> list[Item]:
    """What leads to a reduction comes before what adds to the gradient last."""
    early = [item for item in items if window.parts[item.part][1] is AFTER]
    return [*early, *(item for item in items if item not in early)]


def faults(given: Plan) -> str:
    return "\n".join(map(str, plan_faults(given)))


def test_the_plan_is_sound() -> None:
    assert plan_faults(plan()) == []


def test_a_gather_after_its_use_is_refused() -> None:
    said = faults(reordered(window_with(BEFORE), to_the_end))
    assert f"reads {PARAM}" in said
    assert "has written it. Move it after" in said


def test_a_scatter_before_the_last_addition_is_refused() -> None:
    said = faults(reordered(window_with(AFTER), to_the_begin))
    assert f"reads {GRAD}" in said
    assert "has added its part of" in said


@pytest.mark.parametrize("early", [True, False])
def test_what_is_freed_before_its_last_use_is_refused(early: bool) -> None:
    """Freed as soon as it is made, and after the last window of a rank, which is right."""
    given = plan()
    making = next(op for op in given.once(0, BEFORE) if op.writes)
    free = Op("pp.freed", FREE, (), writes=making.writes)
    first = given.job.stages[0]
    phase = BEFORE if early else AFTER
    ops = {**first.ops, phase: (*first.ops[phase], free)}
    job = replace(given.job, stages=(Stage(0, ops), *given.job.stages[1:]))
    runs = [str(i.ref) for i in given.orders[0] if str(i.ref) in given.windows]
    name = runs[0] if early else runs[-1]
    window = given.windows[name]
    part = next(k for k, (_, other) in enumerate(window.parts) if other is phase)
    items = list(window.items)
    at = items.index(Item(ItemKind.OP, part, making.name)) + 1 if early else len(items)
    items.insert(at, Item(ItemKind.OP, part, free.name))
    window = replace(window, items=tuple(items))
    said = faults(replace(given, job=job, windows={**given.windows, name: window}))
    assert (f"reads {making.writes[0]}" in said) == early


def test_a_parameter_that_no_op_makes_is_refused() -> None:
    """The rows of another are read in its place."""
    given = plan()
    gathers = list(given.once(0, BEFORE))
    at, op = next((k, op) for k, op in enumerate(gathers) if op.writes)
    gathers[at] = replace(op, writes=())
    first = given.job.stages[0]
    job = replace(given.job, stages=(Stage(0, {**first.ops, BEFORE: tuple(gathers)}), *given.job.stages[1:]))
    assert f"reads {op.writes[0]}, which no op makes" in faults(replace(given, job=job))
