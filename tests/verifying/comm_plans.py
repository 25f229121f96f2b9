"""Plans with axes other than pp, to prove and to damage: jobs whose ranks stay equal where they must."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from stretto.ir.action import Phase
from stretto.ir.plan import Plan
from stretto.ir.program import Job, Op, OverlapMode, Ref, Stage, TensorSpec
from stretto.ir.stage_maps import virtual_stages_of
from stretto.schedule.families import FAMILIES, make_schedule
from tests.synthetic_comm import make_comm_costs, make_comm_job, plan_with

AXES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("tp", 2),),
    (("tp", 4),),
    (("dp", 2),),
    (("dp", 3), ("tp", 2)),
    (("cp", 2), ("tp", 2)),
)


def comm_job(
    stages: int,
    microbatches: int,
    axes: tuple[tuple[str, int], ...],
    *,
    blocks: int = 1,
    sequence: bool = False,
    tied: bool = False,
) -> Job:
    """The made-up job, made true: with `sequence` the loss is summed over tp, or it would differ; without,
    every rank has the full one of a norm's gradient. Tied are the first and last stage's weights and
    norms."""
    job = make_comm_job(stages, microbatches, axes=axes, blocks=blocks, sequence=sequence, tied=tied)
    sliced = sequence and job.size("tp") > 1
    parameters = [
        replace(
            p,
            partial=p.partial if sliced else (),
            tied_to="n0" if tied and p.name == f"n{stages - 1}" else p.tied_to,
        )
        for p in job.parameters
    ]
    if not sliced:
        return replace(job, parameters=tuple(parameters))
    last = stages - 1
    scalar = TensorSpec((), "float32")
    *before, loss = job.stages[last].ops[Phase.F]
    start = Op("loss_sum", "comm.all_reduce", (Ref("loss_part"), "sum", "tp", job.size("tp")), (), (scalar,))
    wait = Op("loss", "comm.wait", (Ref("loss_sum"),), (), (scalar,), alias="loss_sum")
    forward = (*before, replace(loss, name="loss_part"), start, wait)
    ended = Stage(last, {**job.stages[last].ops, Phase.F: forward})
    return replace(job, stages=(*job.stages[:last], ended), parameters=tuple(parameters))


def comm_plan(family: str, job: Job, *, overlap: OverlapMode = "local") -> Plan:
    """The job, lowered in a family's order."""
    ranks = len(job.stages) // virtual_stages_of(family, None)
    schedule = make_schedule(family, ranks, job.microbatches)
    return plan_with(job, schedule, make_comm_costs(job), overlap=overlap)


def one_of_each() -> Plan:
    """Two places, with collectives of every kind, and gradients summed over tp, places and dp."""
    job = comm_job(2, 3, (("dp", 3), ("tp", 2)), blocks=2, sequence=True, tied=True)
    return comm_plan("zb-h1", job)


@st.composite
def comm_plans(draw: st.DrawFn) -> Plan:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    job = comm_job(
        draw(st.integers(1, 4)) * virtual_stages_of(family, None),
        draw(st.integers(1, 5)),
        draw(st.sampled_from(AXES)),
        blocks=draw(st.integers(1, 3)),
        sequence=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    mode: OverlapMode = draw(st.sampled_from(["off", "local"]))
    return comm_plan(family, job, overlap=mode)
