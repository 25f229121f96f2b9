"""Plans that are right rank by rank, and block only together: each stuck rank and what it awaits is named."""

from __future__ import annotations

from dataclasses import replace

from stretto.verifying import plan_faults
from tests.verifying.edits import order, window
from tests.verifying.plans import hand_schedule, lowered, rich_job, rich_plan

BASE = rich_plan("1f1b", 2, 2)


def test_deadlock_of_runs_names_every_stuck_rank() -> None:
    # Each rank is right by itself, and messages match: only together they block.
    schedule = hand_schedule((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    found = [str(fault) for fault in plan_faults(lowered(rich_job(2, 2), schedule))]
    assert found == [
        "rank 0, run 0B:0: deadlock: waits for e1:0 (dx1 of microbatch 0), which rank 1 has "
        "not sent "
        "(rank 1 stands at `run 1F:1`). Reorder the runs, so that the sender need not wait "
        "for this rank first",
        "rank 1, run 1F:1: deadlock: waits for e2:1 (h0 of microbatch 1), which rank 0 has "
        "not sent "
        "(rank 0 stands at `run 0B:0`). Reorder the runs, so that the sender need not wait "
        "for this rank first",
    ]


def test_waiting_for_the_loss_too_early() -> None:
    edit = order(0, "recv e1:0; ", "run 0REDUCE_GRAD:-1; recv e1:0; ")
    broken = edit(order(0, "run 0REDUCE_GRAD:-1; ", "")(BASE))
    assert plan_faults(broken) == []  # it starts nothing that would wait
    heard = window("0REDUCE_GRAD", "pp.loss; ", "pp.loss; pp.loss.sum; ")(broken)
    heard = window("0REDUCE_GRAD 2", "pp.loss.sum; ", "")(heard)
    assert [str(fault) for fault in plan_faults(heard)] == [
        "rank 0, run 0REDUCE_GRAD:-1: deadlock: waits for the sum of step/loss (pp.loss.sum), which ranks "
        "[1] have not started (rank 1 stands at `run 1F:0`). Move this wait later",
        "rank 1, run 1F:0: deadlock: waits for e2:0 (h0 of microbatch 0), which rank 0 has "
        "not sent "
        "(rank 0 stands at `run 0REDUCE_GRAD:-1`). Reorder the runs, so that the sender need not wait for "
        "this rank first",
    ]


def test_waiting_for_a_sum_too_early() -> None:
    moved = window("0REDUCE_GRAD 1", "tied.w0; ", "tied.w0; tied.w0.sum; ")(BASE)
    moved = window("0REDUCE_GRAD 2", "tied.w0.sum; ", "")(moved)
    assert plan_faults(moved) == []  # rank 1 needs nothing more of rank 0
    job = rich_job(2, 2)
    # Only w1's gradient is summed, on a rank that has no run before its sum.
    both = tuple(
        replace(p, grads=p.grads if p.name == "w1" else (), tied_to="w0", stages=(0, 1))
        for p in job.parameters
    )
    free = replace(moved, job=replace(moved.job, parameters=both))
    early = order(0, "run 0REDUCE_GRAD:-1; ", "")(order(0, "run 0REDUCE_GRAD 1:-1; ", "")(free))
    early = order(0, "recv e1:0; ", "run 0REDUCE_GRAD:-1; run 0REDUCE_GRAD 1:-1; recv e1:0; ")(early)
    found = [str(fault) for fault in plan_faults(early)]
    assert found[0].startswith(
        "rank 0, run 0REDUCE_GRAD 1:-1: deadlock: waits for the sum of w0 (tied.w0.sum), which ranks [1] "
    )


def test_waiting_for_a_send_at_once_is_accepted_if_its_receive_is_posted() -> None:
    at_once = order(0, "run 0F:0; ", "run 0F:0; sent e2:0; sent e0:0; ")(
        order(0, "sent e2:0; sent e0:0; ", "")(BASE)
    )
    assert plan_faults(at_once) == []


def test_sends_that_need_a_buffer_are_refused() -> None:
    # Both ranks wait until a message has left before they post the receive that lets the other's leave.
    late = order(
        0, "recv e1:0; recv e1:1; run 0F:0; run 0F:1; ", "run 0F:0; run 0F:1; recv e1:0; recv e1:1; "
    )(BASE)
    late = order(0, "sent e2:1; ", "")(late)
    late = order(0, "run 0F:1; ", "run 0F:1; sent e2:1; ")(late)
    late = order(1, "recv e2:1; recv e0:1; ", "")(late)
    late = order(1, "sent e1:0; ", "")(late)
    crossed = order(1, "run 1B:0; ", "run 1B:0; sent e1:0; recv e2:1; recv e0:1; ")(late)
    assert [str(fault) for fault in plan_faults(crossed)] == [
        "rank 0, sent e2:1: deadlock on a transport without buffers: waits for e2:1 (h0 of "
        "microbatch 1), whose "
        "receive rank 1 has not posted (rank 1 stands at `sent e1:0`). "
        "Move it later: other runs must go on before the message can leave",
        "rank 1, sent e1:0: deadlock on a transport without buffers: waits for e1:0 (dx1 of "
        "microbatch 0), whose "
        "receive rank 0 has not posted (rank 0 stands at `sent e2:1`). "
        "Move it later: other runs must go on before the message can leave",
    ]
