"""Windows in which several parts are one microbatch's: they read what it left in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.capturing.trace import trace
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Plan
from stretto.verifying import verify
from tests.capturing.zoo import Chain, mean_square, rows
from tests.runtime.equality import assert_equal, job_of, lowered, plain, run
from tests.verifying.plans import hand_schedule


def with_weights_first(plan: Plan, name: str) -> Plan:
    """The window with the ops of W as early as what they read allows."""
    window = plan.windows[name]
    ops = {op.name: op for made in plan.job.stages[0].ops.values() for op in made}
    left = list(window.items)
    here = {str(item.ref) for item in left}
    made: set[str] = set()
    order: list[Item] = []

    def ready(item: Item) -> bool:
        return all(used in made or used not in here for used in ops[str(item.ref)].uses)

    while left:
        assert all(item.kind is ItemKind.OP for item in left)
        weights = [item for item in left if window.parts[item.part][1] is Phase.W and ready(item)]
        taken = weights[0] if weights else next(item for item in left if ready(item))
        left.remove(taken)
        made.add(str(taken.ref))
        order.append(taken)
    return replace(plan, windows={**plan.windows, name: replace(window, items=tuple(order))})


@pytest.mark.parametrize("orders", ["0F0 (0I0;0W0)OVERLAP_F_B", "(0F0;0I0;0W0)OVERLAP_F_B"])
def test_w_may_read_before_i_what_both_need(orders: str) -> None:
    """Between two layers, I reads what tanh made for its own gradient, and W for the next layer's."""
    model, batch = Chain(), rows(8)
    found = trace(model, batch, mean_square, microbatches=1)
    plan = lowered(job_of(found, 1, 1), hand_schedule((0,), 1, orders))
    [name] = [name for name in plan.windows if "+" in name]
    early = with_weights_first(plan, name)
    assert early.windows[name].items != plan.windows[name].items
    verify(early)
    assert_equal(run(early, model, batch), plain(model, batch, mean_square), 1e-10)
