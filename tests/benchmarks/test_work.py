"""What a microbatch asks of a place, from which the balanced rate of the tensor race follows."""

from __future__ import annotations

from benchmarks.work import work_of

from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.program import Job
from tests.synthetic_comm import make_comm_job


def costs_of(job: Job, op_us: float, collective_us: float) -> Costs:
    """Every op that is no wait and no start takes `op_us`, every collective `collective_us`."""
    times = {
        (stage.index, op.name): 0.0 if op.target.startswith("comm.") else op_us
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
    }
    cost = CollectiveCost(Curve(((0.0, collective_us), (1e9, collective_us))))
    return Costs(
        times, {}, Link(0.0, 1.0), 0.0, "by hand", {("tp", k): cost for k in ("all_reduce", "all_gather")}
    )


def test_the_work_of_a_microbatch() -> None:
    job = make_comm_job(1, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0)
    (stage,) = job.stages
    starts = [op.collective for ops in stage.ops.values() for op in ops if op.collective is not None]
    moved = sum(asked.nbytes for asked in starts)
    plain = sum(not op.target.startswith("comm.") for ops in stage.ops.values() for op in ops)
    work = work_of(job, costs, [0])
    assert len(starts) == 4
    assert work.compute_us == 10.0 * plain
    assert work.collective_us == 160.0
    assert work.wire_bytes == moved  # two ranks: half there, half back
    assert work.message_bytes == 0.0, "no other place"


def test_messages_leave_for_other_places_only() -> None:
    job = make_comm_job(3, 3, blocks=2)
    costs = costs_of(job, 10.0, 40.0)
    there, back = ([e for e in job.edges if e.source == 1 and e.target == target] for target in (2, 0))
    assert there
    assert back
    nbytes = {edge: edge.spec.nbytes for edge in job.edges}
    assert work_of(job, costs, [1]).message_bytes == sum(nbytes[edge] for edge in (*there, *back))
    assert work_of(job, costs, [1, 2]).message_bytes == sum(nbytes[edge] for edge in back)
