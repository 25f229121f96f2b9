"""What the planner makes is accepted: of families, of axes, of captured models, of evaluations."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto.ir.action import Phase
from stretto.ir.forms import forward_only
from stretto.ir.plan import Plan
from stretto.ir.program import Op, Ref, Stage
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from stretto.schedule.families import FAMILIES, forward_schedule, make_schedule
from stretto.verifying import plan_faults
from tests.synthetic import make_plan
from tests.synthetic_comm import make_comm_costs, plan_with, shuffled
from tests.verifying.comm_plans import comm_job, comm_plan, comm_plans
from tests.verifying.edits import window
from tests.verifying.mutations import MUTATIONS
from tests.verifying.plans import BY_HAND, plan_of


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*FAMILIES, *BY_HAND]), st.integers(1, 5), st.integers(1, 9))
def test_families_and_orders_by_hand_are_accepted(name: str, stages: int, microbatches: int) -> None:
    plan = plan_of(name, stages, microbatches)
    assert [str(fault) for fault in plan_faults(plan)] == []
    assert plan_faults(make_plan(plan.schedule)) == []  # the chain without tie and skip


@settings(max_examples=25, deadline=None)
@given(comm_plans(), st.integers(0, 2**32))
def test_what_the_planner_makes_is_accepted(plan: Plan, seed: int) -> None:
    assert [str(fault) for fault in plan_faults(plan)] == []
    # A legal order of ops in which collectives start in another order is as good.
    assert [str(fault) for fault in plan_faults(shuffled(plan, seed))] == []


@pytest.mark.parametrize(
    ("parallel", "tied"),
    [
        # The one with all axes; the others in the longer run.
        pytest.param(parallel, tied, marks=() if (k, tied) == (3, True) else pytest.mark.slow)
        for k, parallel in enumerate(
            (
                {"tp": 2, "sequence_parallel": True},
                {"tp": 2, "pp": 2},
                {"pp": 2, "dp": 2},
                {"tp": 2, "sequence_parallel": True, "pp": 2, "dp": 2},
            )
        )
        for tied in (False, True)
    ],
    ids=str,
)
def test_captured_models_are_accepted(parallel: dict[str, int], tied: bool) -> None:
    model = GPT(GPTConfig(vocab_size=64, layers=2, hidden=32, heads=4, context=16, tie_embeddings=tied))
    tokens = torch.zeros(8, 17, dtype=torch.int64)
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(microbatches=2, **parallel))
    plan = plan_with(job, make_schedule("1f1b", len(job.stages), 2), make_comm_costs(job))
    assert [str(fault) for fault in plan_faults(plan)] == []
    for name, mutation in MUTATIONS.items():
        broken = mutation(plan, Random(3))
        assert broken is None or not broken.sure or plan_faults(broken.plan), name


@pytest.mark.parametrize("axes", [(("tp", 2),), (("dp", 2), ("tp", 2))])
def test_evaluations_are_accepted(axes: tuple[tuple[str, int], ...]) -> None:
    job = forward_only(comm_job(2, 3, axes, sequence=True, tied=True))
    plan = plan_with(job, forward_schedule(2, 3), make_comm_costs(job))
    assert [str(fault) for fault in plan_faults(plan)] == []
    start = Op(
        *("more", "comm.all_reduce", (Ref("grad/n0"), "sum", "tp", 2), ()),
        (job.parameters[-1].spec,),
        "grad/n0",
    )
    wait = Op("more.sum", "comm.wait", (Ref("more"),), (), start.outputs, "grad/n0", writes=("grad/n0",))
    stage = plan.job.stages[0]
    ops = {**stage.ops, Phase.REDUCE_GRAD: (*stage.ops[Phase.REDUCE_GRAD], start, wait)}
    more = replace(plan, job=replace(plan.job, stages=(Stage(0, ops), *plan.job.stages[1:])))
    end = str(plan.orders[0][-1].ref)
    both = window(end, "pp.loss.sum; ", "pp.loss.sum; more; more.sum; ")(more)
    found = [str(fault) for fault in plan_faults(both)]
    assert "rank 0, more: reads grad/n0, which this rank does not have. Take it out" in found, found


def calls(blocks: int, microbatches: int) -> int:
    """Calls of Python functions that the proof of a plan makes."""
    plan = comm_plan("1f1b", comm_job(2, microbatches, (("dp", 2), ("tp", 2)), blocks=blocks, sequence=True))
    assert plan_faults(plan) == []  # shapes of equal calls are known from here on
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        plan_faults(plan)
    finally:
        sys.setprofile(None)
    return count


def test_programs_are_proved_once() -> None:
    """More microbatches cost as much for large programs as for small ones: the work is that of messages."""
    small, large = (calls(blocks, 12) - calls(blocks, 6) for blocks in (1, 12))
    assert 0 < large <= 1.02 * small
    assert calls(12, 6) > 3 * calls(1, 6)
