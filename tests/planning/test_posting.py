"""Receives are posted in time: a sender that waits for each message at once never waits forever. And what
joins several places starts in one order on all of them."""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Edge, Job, Op, Ref, Stage
from stretto.ir.stage_maps import virtual_stages_of
from stretto.planning.lower import latest_posts, post_positions
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import FAMILIES
from stretto.verifying import plan_faults
from stretto.verifying.trace import EventKind, trace_of
from tests.synthetic import make_costs, make_job
from tests.verifying.plans import LOOPED, lowered, rich_job


def job_with_a_value_for_w(stages: int, microbatches: int) -> Job:
    """The chain, whose last W also reads the first stage's h0, beside what it is sent for F: on their
    communicator a message that is needed late is before one that is needed early."""
    job = make_job(stages, microbatches)
    last = job.stages[-1]
    read = Op("late", "aten.mul.Tensor", (Ref("h0"), Ref("h0")), (), (job.edges[0].spec,))
    ops = {**last.ops, Phase.W: (*last.ops[Phase.W], read)}
    edge = Edge(len(job.edges), "h0", 0, Phase.F, stages - 1, Phase.W, job.edges[0].spec)
    return replace(job, stages=(*job.stages[:-1], Stage(last.index, ops)), edges=(*job.edges, edge))


def test_a_value_that_is_needed_late_stops_nobody() -> None:
    for family in FAMILIES:
        each = virtual_stages_of(family, None)
        for ranks in (2, 4) if each == 1 else (2,):
            job = job_with_a_value_for_w(ranks * each, 6)
            for mode in ("off", "local"):
                plan = make_plan(job, make_costs(job, latency_us=30.0), schedule=family, overlap=mode)
                assert plan.overlap == mode
                assert plan_faults(plan) == []


def test_latest_posts_are_of_a_walk_without_standing() -> None:
    # Rank 0 sends two messages in two runs; rank 1 needs the second first, and the first in its last run.
    waits = [[[], []], [[], [(0, 1)], [(0, 0)]]]
    sends = [[{(0, 0): 1}, {(0, 1): 1}], [{}, {}, {}]]
    latest = latest_posts(waits, sends)
    # When a message leaves, rank 1 has begun one run, and cannot begin the next before the second is there.
    assert latest == {(0, 0): 1, (0, 1): 1}
    needed = {(0, 0): 2, (0, 1): 1}
    assert post_positions([(0, 0), (0, 1)], needed, 1, latest) == [((0, 0), 0), ((0, 1), 1)]


def starts(plan: Plan, rank: int) -> list[str]:
    """What joins places, in the order in which the rank starts it."""
    joined = {found.name for found in plan.communicators if found.joins_pp_ranks}
    events = [e.op for e in trace_of(plan, rank) if e.kind is EventKind.START and e.op is not None]
    return [op.lane for op in events if op.lane in joined]


def test_the_loss_starts_before_sums_of_ties_on_all_ranks() -> None:
    plan = lowered(rich_job(4, 2), LOOPED)
    assert starts(plan, 0) == starts(plan, 1) == ["loss", "tied w0"]
    # A copy that adds nothing could be summed from the first run on.
    job = rich_job(4, 2)
    idle = tuple(replace(p, grads=()) if p.name == "w3" else replace(p, tied_to="w0") for p in job.parameters)
    idle = tuple(replace(p, tied_to="w0") if p.name == "w3" else p for p in idle)
    other = lowered(replace(job, parameters=idle), LOOPED)
    assert starts(other, 0) == starts(other, 1) == ["loss", "tied w0"]
    assert plan_faults(other) == []
