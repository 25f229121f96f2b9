"""The verifier accepts what the planner makes, and refuses every plan that a mutation has broken."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schedule.families import FAMILIES
from stretto.verifying import plan_faults
from tests.synthetic import make_plan
from tests.verifying.mutations import MUTATIONS
from tests.verifying.order_mutations import Mutation
from tests.verifying.plans import BY_HAND, plan_of

NAMES = [*FAMILIES, *BY_HAND]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 9))
def test_what_the_planner_makes_is_accepted(name: str, stages: int, microbatches: int) -> None:
    plan = plan_of(name, stages, microbatches)
    assert [str(fault) for fault in plan_faults(plan)] == []
    assert plan_faults(make_plan(plan.schedule)) == []  # the chain without tie and skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_what_a_mutation_breaks_is_refused(
    mutation: Mutation, name: str, stages: int, microbatches: int, seed: int
) -> None:
    plan = plan_of(name, stages, microbatches)
    broken = mutation(plan, Random(seed))
    if broken is not None:
        assert broken != plan
        assert plan_faults(broken)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_applies_somewhere(mutation: Mutation) -> None:
    broken = mutation(plan_of("1f1b", 2, 4), Random(1))
    assert broken is not None
    assert plan_faults(broken)
