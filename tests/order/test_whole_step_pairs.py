"""Messages that leave together, in steps in which each rank has one window."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from stretto.order import Role
from stretto.order.graphs import Graphs
from stretto.order.pairs import Border, Borders, borders, paired, partners
from stretto.order.search import Scope
from stretto.order.walk import Chosen
from stretto.order.whole_step import point_of
from tests.order.test_whole_step import job_of, whole_plan


def sent_us(scope: Scope, found: Chosen) -> dict[tuple[int, int], float]:
    """(edge, microbatch) -> when the message was sent."""
    return {
        (int(node.item.ref), whole.microbatches[node.item.part]): found.timings[rank].ends_us[index]
        for rank, whole in enumerate(scope.wholes)
        for index, node in enumerate(whole.graph.nodes)
        if node.role is Role.SEND
    }


def walked(pairs: Borders) -> tuple[Scope, Chosen | None]:
    plan = whole_plan(*job_of())
    graphs = Graphs.of(plan)
    scope = Scope(graphs.wholes(0.0005), 0.0, 0.0, plan)
    each_us = 1000.0 / plan.job.microbatches
    return scope, scope.walk(point_of(scope, graphs, each_us, (0.3, 0.3), (0.0, 0.0), pairs))


def test_a_border_is_a_value_and_its_gradient_where_cards_are_shared() -> None:
    job, costs = job_of(microbatches=3, stages=3)
    plan = whole_plan(job, costs)
    found = borders(plan)
    assert len(found) == 2
    for border in found:
        value, gradient = job.edges[border.value], job.edges[border.gradient]
        assert (value.source, value.target) == (gradient.target, gradient.source)
        assert border.values == (None, None, None)
    assert borders(replace(plan, costs=replace(costs, shared=()))) == ()


def test_values_go_ahead_of_gradients_as_in_1f1b_and_further() -> None:
    plan = whole_plan(*job_of(microbatches=4, stages=3))
    far, near = paired(plan, borders(plan), 0)
    assert far.values == (2, 3, None, None), "two stages follow"
    assert near.values == (1, 2, 3, None)
    assert paired(plan, borders(plan), 1)[1].values == (2, 3, None, None)
    both = partners((near,))
    assert both[near.gradient, 0] == (near.value, 1)
    assert both[near.value, 1] == (near.gradient, 0)
    assert (near.value, 0) not in both


def test_paired_messages_leave_together() -> None:
    plan = whole_plan(*job_of())
    pairs = paired(plan, borders(plan), 2)
    apart_us = []
    for given in (pairs, ()):
        scope, found = walked(given)
        assert found is not None
        at_us = sent_us(scope, found)
        apart_us.append([abs(at_us[one] - at_us[other]) for one, other in partners(pairs).items()])
    longest_us = max(node.work_us for node in scope.wholes[0].graph.nodes)
    # A lane that is at work sends when its op has ended.
    assert max(apart_us[0]) <= 2 * longest_us
    assert max(apart_us[1]) > 2 * longest_us


def test_a_value_that_waits_for_its_own_gradient_waits_for_ever() -> None:
    plan = whole_plan(*job_of())
    (border,) = borders(plan)
    circle = replace(border, values=(0, *border.values[1:]))
    assert walked((circle,))[1] is None


@pytest.mark.parametrize("seed", range(3))
def test_pairs_that_are_changed_stay_pairs(seed: int) -> None:
    draw = random.Random(seed)
    border = Border(0, 1, (2, 3, 4, 5, None, None))
    seen = set()
    for _ in range(300):
        border = border.moved(draw)
        seen.add(border.values)
        values = [value for value in border.values if value is not None]
        assert len(set(values)) == len(values)
        assert all(at < value < 6 for at, value in enumerate(border.values) if value is not None)
    assert len(seen) > 20
