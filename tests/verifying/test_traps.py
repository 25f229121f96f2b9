"""Traps of overlapped communication, each of which must be refused before it runs: collectives that reach a
communicator in two orders, waits before or without their start, one event for two collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.ir.action import Phase
from stretto.ir.plan import Instruction, Item, Plan
from stretto.ir.program import Job, Ref, Stage
from stretto.verifying import plan_faults, verify
from tests.synthetic_comm import make_comm_costs, plan_with
from tests.verifying.comm_plans import comm_job
from tests.verifying.edits import order, sums
from tests.verifying.plans import LOOPED, hand_schedule, lowered, rich_job

PAIRED = hand_schedule((0,), 3, "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2")
SPLIT = hand_schedule((0,), 3, "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2")
WINDOW = "0F+0B"


def job_of() -> Job:
    """One stage with one all-reduce forward (fr0.0) and one backward (br0.0)."""
    return comm_job(1, 3, (("tp", 2),))


def late_job() -> Job:
    """The same; the backward's all-reduce is started in I and waited for in W."""
    job = job_of()
    ops = dict(job.stages[0].ops)
    at = [op.name for op in ops[Phase.I]].index("br0.0_w")
    ops[Phase.I], ops[Phase.W] = ops[Phase.I][:at], (*ops[Phase.I][at:], *ops[Phase.W])
    return replace(job, stages=(Stage(0, ops),))


def paired() -> Plan:
    job = job_of()
    return plan_with(job, PAIRED, make_comm_costs(job))


def split() -> Plan:
    job = late_job()
    return plan_with(job, SPLIT, make_comm_costs(job))


def said(plan: Plan) -> list[str]:
    return [str(fault) for fault in plan_faults(plan)]


def edited(plan: Plan, old: str, new: str) -> Plan:
    """The pair's window with a part of its items replaced; items are written with `; ` between them."""
    text = "; ".join(map(str, plan.windows[WINDOW].items)) + "; "
    assert text.count(old) == 1, text
    items = tuple(Item.parse(part) for part in text.replace(old, new).split("; ") if part)
    return replace(plan, windows={**plan.windows, WINDOW: replace(plan.windows[WINDOW], items=items)})


def test_the_plans_that_are_broken_here_are_whole() -> None:
    for plan in (paired(), split()):
        verify(plan)


# Two orders on one communicator, or on communicators that cannot all be resident.


def test_sums_that_two_ranks_start_in_different_orders() -> None:
    job = rich_job(4, 2)
    tied = tuple(replace(p, tied_to="w1") if p.name == "w2" else p for p in job.parameters)
    plan = lowered(replace(job, parameters=tied), LOOPED)
    swapped = order(
        1,
        "run 1REDUCE_GRAD 1:-1; run 1B:0; run 1B:1; run 1REDUCE_GRAD 2:-1; ",
        "run 1B:0; run 1B:1; run 1REDUCE_GRAD 2:-1; run 1REDUCE_GRAD 1:-1; ",
    )(plan)
    assert said(plan) == []
    (fault,) = said(swapped)
    assert "the order here is loss, tied w1, tied w0, that of rank 0 is loss, tied w0, tied w1" in fault


def test_messages_that_two_ranks_start_in_different_orders() -> None:
    both = ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    plan = lowered(rich_job(2, 3), hand_schedule((0, 1), 3, *both))
    assert said(plan) == []
    receives = [str(i) for i in plan.orders[1] if str(i).startswith("recv e0")]
    first, second = receives[:2]
    swapped = [{first: second, second: first}.get(str(i), str(i)) for i in plan.orders[1]]
    damaged = replace(plan, orders=(plan.orders[0], tuple(map(Instruction.parse, swapped))))
    assert any("on communicator pp 0>1 is e0:1" in fault and "sends e0:0" in fault for fault in said(damaged))


def test_two_sums_on_one_communicator_of_places() -> None:
    """Each tied gradient has a communicator of its own, so that no order can differ on it."""
    job = rich_job(4, 2)
    tied = tuple(replace(p, tied_to="w1") if p.name == "w2" else p for p in job.parameters)
    plan = lowered(replace(job, parameters=tied), LOOPED)
    (fault, *_) = said(sums("tied.w1", lane="tied w0")(plan))
    assert "Give each tied gradient a sum and a communicator of its own" in fault


# Waits that are not their start's.


@pytest.mark.parametrize("pair", [("fr0.0; ", "fr0.0_w; "), ("#1 br0.0; ", "#1 br0.0_w; ")], ids=["F", "I"])
def test_a_wait_before_its_start(pair: tuple[str, str]) -> None:
    start, wait = pair
    plan = edited(paired(), start + wait, wait + start)
    name = start.strip("#1; ")
    assert [f"{name}_w: reads {name}, which is made later" in fault for fault in said(plan)] == [True]


def test_a_wait_with_another_microbatchs_part() -> None:
    plan = edited(paired(), "fr0.0_w; ", "#1 fr0.0_w; ")
    assert any("stage 0 has no op 'fr0.0_w' in its B program" in fault for fault in said(plan))
    plan = edited(paired(), "#1 br0.0_w; ", "br0.0_w; ")
    assert any("stage 0 has no op 'br0.0_w' in its F program" in fault for fault in said(plan))


def test_a_wait_in_a_later_window_is_of_its_own_microbatch() -> None:
    """W of one microbatch stands where that microbatch's I has not run yet, though another's has."""
    early = order(
        0,
        "run 0I:1; run 0W:0; run 0F:2; run 0I:2; run 0W:1; run 0W:2; ",
        "run 0W:1; run 0I:1; run 0F:2; run 0I:2; run 0W:0; run 0W:2; ",
    )(split())
    assert any("of microbatch 1, which 0I1 has not made yet" in fault for fault in said(early))


def test_a_wait_in_an_earlier_phase_than_its_start() -> None:
    job = job_of()
    ops = dict(job.stages[0].ops)
    wait = next(op for op in ops[Phase.I] if op.name == "br0.0_w")
    ops[Phase.I] = tuple(op for op in ops[Phase.I] if op is not wait)
    ops[Phase.F] = (*ops[Phase.F], wait)
    broken = replace(job, stages=(Stage(0, ops),))
    faults = said(plan_with(broken, PAIRED, make_comm_costs(job)))
    assert any("br0.0_w: waits for br0.0, which starts no communication" in fault for fault in faults)
    assert any("br0.0: nothing waits until it is done" in fault for fault in faults)


def test_a_pair_of_one_microbatch() -> None:
    """Its I would wait for what its own window is still making."""
    plan = order(0, "run 0F+0B:1,0; ", "run 0F+0B:1,1; ")(paired())
    assert any("overlaps two phases of stage 0 for one microbatch, 1" in fault for fault in said(plan))


# One event for two collectives.


def test_one_wait_for_two_collectives() -> None:
    """The second start reads what the first has left, and nobody waits for the second."""
    job = job_of()
    ops = dict(job.stages[0].ops)
    start = next(op for op in ops[Phase.F] if op.name == "fr0.0")
    at = ops[Phase.F].index(start)
    second = replace(start, name="fr_second")
    ops[Phase.F] = (*ops[Phase.F][: at + 1], second, *ops[Phase.F][at + 1 :])
    broken = replace(job, stages=(Stage(0, ops),))
    assert said(plan_with(broken, PAIRED, make_comm_costs(broken))) == [
        "rank 0, stage 0F, fr_second: nothing waits until it is done. "
        "Add a `comm.wait` of fr_second to stage 0"
    ]
    wait = next(op for op in ops[Phase.F] if op.name == "fr0.0_w")
    both = replace(wait, args=(Ref("fr0.0"), Ref("fr_second")))
    ops[Phase.F] = tuple(both if op is wait else op for op in ops[Phase.F])
    broken = replace(job, stages=(Stage(0, ops),))
    faults = said(plan_with(broken, PAIRED, make_comm_costs(broken)))
    assert any("fr0.0_w: cannot be read. Write comm.wait(value)" in fault for fault in faults)


def test_one_name_for_two_collectives() -> None:
    """I and W share their names: a wait could mean either start."""
    job = job_of()
    ops = dict(job.stages[0].ops)
    start, wait = (next(op for op in ops[Phase.I] if op.name == name) for name in ("br0.0", "br0.0_w"))
    again = replace(start, args=(Ref("dn0"), *start.args[1:]), outputs=(job.parameters[1].spec,))
    waited = replace(wait, name="dn_sum", outputs=again.outputs)
    ops[Phase.W] = (*ops[Phase.W], again, waited)
    broken = replace(job, stages=(Stage(0, ops),))
    faults = said(plan_with(broken, PAIRED, make_comm_costs(broken)))
    assert any("op 'br0.0' is there twice" in fault for fault in faults)


def test_a_start_in_a_window_twice() -> None:
    plan = edited(paired(), "fr0.0; ", "fr0.0; fr0.0; ")
    assert any("fr0.0: stands twice" in fault for fault in said(plan))
