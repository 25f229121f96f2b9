"""Every refusal of a plan, by its message. The base is 1F1B on two ranks with two microbatches; a table edits
the text of its orders and windows, so that each case shows what it breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.capturing.trace import trace
from stretto.errors import PlanError
from stretto.ir.plan import Communicator
from stretto.planning.choose import AHEAD
from stretto.planning.pair import whole
from stretto.planning.schedules import paired
from stretto.schedule.families import make_schedule
from stretto.verifying import plan_faults, verify
from stretto.verifying.trace import EventKind, trace_of
from tests.capturing.zoo import BatchNorm, mean_square, rows
from tests.passes.steps import step_of
from tests.runtime.equality import job_of
from tests.runtime.equality import lowered as lower_it
from tests.verifying.edits import Edit, order, window
from tests.verifying.plans import LOOPED, NEIGHBOURS, hand_schedule, lowered, rich_job, rich_plan

BASE = rich_plan("1f1b", 2, 2)
EDGES = "e0 y0 0F>1F, e1 dx1 1I>0I, e2 h0 0F>1F"


def communicators(*wanted: Communicator) -> Edit:
    return lambda plan: replace(plan, communicators=wanted)


def test_the_base_has_no_fault_and_the_edges_of_the_table() -> None:
    assert plan_faults(BASE) == []
    assert ", ".join(map(str, BASE.job.edges)) == EDGES


REFUSED: list[tuple[Edit, str]] = [
    # windows
    (
        window("0F", "h0; send e2; y0; ", "h0; send e2; "),
        "rank 0, window 0F, y0: the op is missing, and 0F needs it",
    ),
    (
        window("0B", "g0; ", "g0; g0; "),
        "rank 0, window 0B, g0: stands twice, at items 1 and 2. Remove one of them",
    ),
    (
        window("0F", "h0; send e2; y0; ", "y0; h0; send e2; "),
        "rank 0, window 0F, y0: reads h0, which is made later, at item 1",
    ),
    (window("0F", "send e0; ", ""), "rank 0, window 0F, send e0: missing: y0 never leaves. Add it after y0"),
    (
        window("0F", "y0; send e0; ", "send e0; y0; "),
        "rank 0, window 0F, send e0: stands before y0 is made. Move it after y0",
    ),
    (
        window("0F", "send e0; ", "send e0; send e1; "),
        "rank 0, window 0F, send e1: the edge takes nothing from stage 0 in phase F",
    ),
    (
        window("0F", "send e0; ", "send e0; wait e1; "),
        "rank 0, window 0F, wait e1: the edge brings nothing to stage 0 in phase F",
    ),
    (
        window("1F", "wait e0; ", ""),
        "rank 1, window 1F, h1: reads y0, which edge e0 brings, but the window never waits "
        "for it. Add `wait e0`",
    ),
    (
        window("1F", "wait e0; h1; ", "h1; wait e0; "),
        "rank 1, window 1F, h1: reads y0 before `wait e0`, which stands later, at item 3",
    ),
    # runs against the schedule
    (
        order(0, "run 0F:1; ", ""),
        "rank 0, 0B0: run 1 of the order is 0B0, but the schedule says 0F1. Lower it again",
    ),
    (
        order(0, "run 0B:1; ", ""),
        "rank 0, nothing: run 3 of the order is nothing, but the schedule says 0B1. Lower it again",
    ),
    (order(0, "run 0F:1; ", "run 0F:1; run 0F:1; "), "rank 0, 0F1: runs twice, at positions 1 and 2"),
    (
        order(1, "run 1F:0; run 1B:0; ", "run 1B:0; run 1F:0; "),
        "rank 1, 1B0: backward before forward of microbatch 0",
    ),
    # values that a stage keeps
    (
        order(1, "run 1F:0; run 1B:0; ", "run 1B:0; run 1F:0; "),
        "rank 1, run 1B:0: reads h1 of microbatch 0, which 1F0 has not made yet. Run 1F0 before it",
    ),
    (
        order(1, "run 1B:1; ", "run 1B:1; run 1B:1; "),
        "rank 1, run 1B:1: reads h1 of microbatch 1, which is freed: 1I1, its last reader, has run",
    ),
    # receives
    (
        order(0, "recv e1:1; ", ""),
        "rank 0, run 0B:1: waits for e1:1 (dx1 of microbatch 1), whose receive is never "
        "posted. Add `recv e1:1` before it",
    ),
    (
        order(0, "recv e1:1; ", ""),
        "rank 0, edge e1 dx1 1I>0I: not received for microbatches 1. Add `recv "
        "e1:<microbatch>` once for each",
    ),
    (
        order(0, "run 0B:1; ", "run 0B:1; recv e1:1; "),
        "rank 0, recv e1:1: the receive is posted twice. Remove one of them",
    ),
    (
        order(1, "recv e0:1; run 1F:0; run 1B:0; run 1F:1; ", "run 1F:0; run 1B:0; run 1F:1; recv e0:1; "),
        "rank 1, run 1F:1: waits for e0:1 (y0 of microbatch 1), whose receive is posted "
        "later, at instruction 6. Move `recv e0:1` before it",
    ),
    (
        order(0, "recv e1:1; ", "recv e1:1; recv e0:0; "),
        "rank 0, recv e0:0: the edge leads from rank 0 to rank 1, not here. Move it to rank 1",
    ),
    (
        order(0, "recv e1:1; ", "recv e1:1; recv e1:2; "),
        "rank 0, recv e1:2: there is no microbatch 2. Microbatches count from 0 to 1",
    ),
    (
        order(1, "recv e0:0; recv e2:1; ", "recv e2:1; recv e0:0; "),
        "rank 1, recv e2:1: receive 1 on communicator pp 0>1 is e2:1 (h0 of microbatch 1), "
        "but rank 0 sends e0:0 (y0 of microbatch 0) there. Post the receives in the sender's "
        "order",
    ),
    # sends
    (
        order(0, "sent e2:1; ", ""),
        "rank 0, send e2:1: nothing waits until e2:1 (h0 of microbatch 1) has left; its "
        "buffer could be reused too early. Add `sent e2:1`",
    ),
    (
        order(0, "sent e2:1; ", "sent e2:1; sent e2:1; "),
        "rank 0, sent e2:1: waited for twice. Remove one of them",
    ),
    (
        order(0, "recv e1:0; ", "recv e1:0; sent e2:0; "),
        "rank 0, sent e2:0: waits for a message that has not started. Move it after the run that sends it",
    ),
    (
        order(0, "sent e2:1; ", "sent e2:1; sent e1:1; "),
        "rank 0, sent e1:1: the message is not sent from this rank. Remove it",
    ),
    (
        order(0, "run 0F:1; ", ""),
        "rank 0, edge e0 y0 0F>1F: not sent for microbatches 1. Run the window that sends it once for each",
    ),
    (
        order(0, "run 0F:1; ", "run 0F:1; run 0F:1; "),
        "rank 0, edge e0 y0 0F>1F: sent twice for microbatches 1. Send it once",
    ),
    # the loss
    (
        order(0, "run 0REDUCE_GRAD:-1; ", ""),
        "rank 0, loss: is never summed; other ranks would wait. Add its sum",
    ),
    (
        order(0, "run 0REDUCE_GRAD:-1; ", "run 0REDUCE_GRAD:-1; run 0REDUCE_GRAD:-1; "),
        "rank 0, window 0REDUCE_GRAD, pp.loss: starts a second time; instruction 5 did. Keep one",
    ),
    (
        window("1REDUCE_GRAD", "pp.loss; ", "pp.loss.sum; pp.loss; "),
        "rank 1, window 1REDUCE_GRAD, pp.loss.sum: waits for pp.loss, which does not start before it",
    ),
    (
        order(1, "run 1F:1; run 1REDUCE_GRAD:-1; ", "run 1REDUCE_GRAD:-1; run 1F:1; "),
        "rank 1, window 1REDUCE_GRAD, pp.loss: starts before `run 1F:1` has added its part of the loss. Move "
        "it after instruction 7",
    ),
    # tied gradients
    (
        window("1REDUCE_GRAD 2", "tied.w0.sum; ", ""),
        "rank 1, tied.w0.sum: missing; the step could end before the sum is there. Add it after tied.w0",
    ),
    (
        order(1, "run 1B:1; run 1REDUCE_GRAD 1:-1; ", "run 1REDUCE_GRAD 1:-1; run 1B:1; "),
        "rank 1, window 1REDUCE_GRAD 1, tied.w0: starts before `run 1B:1` has added its part of the gradient "
        "of w0. Move it after instruction 9",
    ),
    # communicators
    (
        communicators(*BASE.communicators[1:]),
        "communicator pp 0>1: missing, and ranks [0, 1] need it. Add it to the list of communicators",
    ),
    (
        communicators(*BASE.communicators, BASE.communicators[0]),
        "communicator pp 0>1: is there twice. Remove one of them",
    ),
    (
        communicators(Communicator("pp 0>1", (1, 0)), *BASE.communicators[1:]),
        "communicator pp 0>1: joins ranks [1, 0], but its work is between ranks [0, 1]. Give "
        "it the ranks [0, 1]",
    ),
    (
        communicators(*BASE.communicators, Communicator("spare", (1, 1))),
        "communicator spare: has a rank twice: [1, 1]. Name each rank once",
    ),
    # agreement
    (
        lambda plan: replace(plan, job=replace(plan.job, microbatches=3)),
        "schedule: is for 2 microbatches, but the job has 3. Make the schedule for 3 microbatches",
    ),
    (
        lambda plan: replace(plan, schedule=replace(plan.schedule, stages=3)),
        "schedule: is for 3 stages, but the job has 2. Make the schedule for 2 stages",
    ),
    (
        order(0, "run 0F:0; ", "run 5F:0; "),
        "rank 0, orders[0][2]: there is no window '5F'. Name something that exists",
    ),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED, ids=[message[:70] for _, message in REFUSED])
def test_refusals(edit: Edit, message: str) -> None:
    found = [str(fault) for fault in plan_faults(edit(BASE))]
    assert any(fault.startswith(message) for fault in found), found


def test_the_error_lists_every_fault() -> None:
    swapped = window("1REDUCE_GRAD", "pp.loss; ", "pp.loss.sum; pp.loss; ")(BASE)
    broken = window("1REDUCE_GRAD 2", "tied.w0.sum; ", "")(swapped)
    with pytest.raises(PlanError, match="the plan cannot run: 2 faults") as caught:
        verify(broken)
    assert len(caught.value.faults) == 2
    assert "pp.loss.sum: waits" in str(caught.value)
    assert "rank 1, tied.w0.sum: missing" in str(caught.value)


def test_values_that_stay_on_their_rank() -> None:
    plan = lowered(rich_job(3, 2), NEIGHBOURS)
    assert plan_faults(plan) == []
    received = order(0, "run 0F:0; ", "recv e0:0; run 0F:0; ")(plan)
    assert [str(fault) for fault in plan_faults(received)] == [
        "rank 0, recv e0:0: the value stays on rank 0; there is no message. Remove it"
    ]
    swapped = order(0, "run 0F:0; run 1F:0; ", "run 1F:0; run 0F:0; ")(plan)
    assert any(
        "run 1F:0: waits for e0:0 (y0 of microbatch 0), which stage 0 of the same rank has "
        "not made yet" in str(f)
        for f in plan_faults(swapped)
    )


def test_two_phases_of_one_microbatch_share_a_window_that_is_ordered_for_it() -> None:
    schedule = hand_schedule((0,), 1, "0F0 (0I0;0W0)OVERLAP_F_B")
    plan = lowered(rich_job(1, 1), schedule)
    assert plan_faults(plan) == [], "its order is made for one microbatch"
    ordered = plan.windows["0I+0W=0,0"]
    apart = replace(plan, windows={**plan.windows, ordered.name: replace(ordered, shares=())})
    [fault] = plan_faults(apart)
    assert str(fault) == (
        "rank 0, run 0I+0W=0,0:0,0: overlaps two phases of stage 0 for one microbatch, 0, of "
        "which one needs the other. "
        "Overlap different microbatches, or order a window for it; I and W together are B"
    )


def test_a_value_that_nothing_brings() -> None:
    plan = lowered(rich_job(2, 1), hand_schedule((0, 1), 1, "0F0 0B0", "1F0 1B0"))
    edges = tuple(edge for edge in plan.job.edges if edge.value != "h0")
    broken = replace(plan, job=replace(plan.job, edges=edges))
    broken = order(1, "recv e2:0; ", "")(order(0, "sent e2:0; ", "")(broken))
    broken = window("1F", "wait e2; ", "")(window("0F", "send e2; ", "")(broken))
    assert str(plan_faults(broken)[0]) == (
        "rank 1, window 1F, skip: reads h0, which no op before it makes and no edge brings "
        "to stage 1. "
        "Add an edge from the stage that makes it"
    )


def test_tied_gradients_start_in_one_order() -> None:
    plan = lowered(rich_job(4, 2), LOOPED)
    job = plan.job
    # A second pair of tied parameters on the same two ranks.
    tied = tuple(replace(p, tied_to="w1") if p.name == "w2" else p for p in job.parameters)
    both = lowered(replace(job, parameters=tied), LOOPED)
    names = [[e.op.name for e in trace_of(both, r) if e.kind is EventKind.REDUCE and e.op] for r in (0, 1)]
    assert names == [["pp.loss", "tied.w0", "tied.w1"]] * 2
    assert plan_faults(both) == []
    swapped = window("0REDUCE_GRAD 1", "tied.w0; tied.w1; ", "tied.w1; tied.w0; ")(both)
    assert [str(fault) for fault in plan_faults(swapped)] == [
        "rank 1, window 1REDUCE_GRAD 1, sum on tied w0: starts before that on tied w1, but rank 0, window "
        "0REDUCE_GRAD 1, starts tied w1 first: the order here is loss, tied w0, tied w1, that of rank 0 "
        "is loss, tied w1, tied w0. Start sums of tied gradients, and of the loss, in the same order on all "
        "ranks"
    ]


def test_microbatches_that_update_one_buffer_do_not_share_a_window() -> None:
    found = trace(BatchNorm(), rows(8), mean_square, microbatches=4)
    job = job_of(found, 2, 4)
    schedule = make_schedule("1f1b", 2, 4)
    shared = whole(schedule)
    assert shared is not None
    assert any(
        "all update buffer 'norms.0.running_mean' of stage 0" in str(fault)
        for fault in plan_faults(lower_it(job, shared))
    )
    assert plan_faults(lower_it(job, schedule)) == []
    step, context = step_of(job, schedule)
    for ahead in AHEAD:  # a forward beside a backward updates once
        assert plan_faults(lower_it(job, paired(step, context, ahead=ahead).schedule)) == []
