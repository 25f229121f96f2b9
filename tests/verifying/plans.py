"""Plans to prove and to damage: the synthetic chain, with a tied parameter and a long skip added."""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.action import Phase, Schedule, parse_slot
from stretto.ir.plan import Plan
from stretto.ir.program import Edge, Job, Op, Ref, Stage
from stretto.planning.lower import lower
from stretto.schedule.families import make_schedule
from tests.synthetic import ACTIVATION, WEIGHT, WORK, make_costs, make_job


def rich_job(stages: int, microbatches: int) -> Job:
    """The chain; the last stage also reads the first one's h0 (in F and in W), and shares its w0."""
    job = make_job(stages, microbatches)
    if stages == 1:
        return job
    last = stages - 1
    ops = dict(job.stages[last].ops)
    ops[Phase.F] = (
        Op("skip", WORK, (Ref("h0"), Ref("param/w0")), (), (ACTIVATION,)),
        *ops[Phase.F],
    )
    ops[Phase.W] = (
        *ops[Phase.W],
        Op("dskip", WORK, (Ref("h0"), Ref("skip")), (), (WEIGHT,)),
    )
    parameters = list(job.parameters)
    parameters[0] = replace(
        parameters[0], stages=(0, last), grads=(*parameters[0].grads, (last, Phase.W, "dskip"))
    )
    edge = Edge(len(job.edges), "h0", 0, Phase.F, last, Phase.F, ACTIVATION)
    return replace(
        job,
        stages=(*job.stages[:last], Stage(last, ops)),
        edges=(*job.edges, edge),
        parameters=tuple(parameters),
    )


def lowered(job: Job, schedule: Schedule) -> Plan:
    return lower(job, schedule, make_costs(job))


def rich_plan(family: str, ranks: int, microbatches: int) -> Plan:
    schedule = make_schedule(family, ranks, microbatches)
    return lowered(rich_job(schedule.stages, microbatches), schedule)


def hand_schedule(stage_ranks: tuple[int, ...], microbatches: int, *orders: str) -> Schedule:
    """A schedule from tokens: one text a rank."""
    slots = tuple(tuple(parse_slot(token) for token in order.split()) for order in orders)
    return Schedule("hand", len(stage_ranks), microbatches, stage_ranks, slots)


OVERLAPPED = hand_schedule(
    (0, 1),
    3,
    "0F0 0F1 0F2 0B0 0B1 0B2",
    "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2",
)
LOOPED = hand_schedule(
    (0, 1, 0, 1),
    2,
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "1F0 1F1 3F0 3I0 3F1 3W0 3B1 1B0 1B1",
)
NEIGHBOURS = hand_schedule((0, 0, 1), 2, "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 2B0 2F1 2B1")
BOTH_WAYS = hand_schedule((0, 1), 2, "0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
BY_HAND = {"overlapped": OVERLAPPED, "looped": LOOPED, "neighbours": NEIGHBOURS, "both ways": BOTH_WAYS}


def plan_of(name: str, ranks: int, microbatches: int) -> Plan:
    """A family's plan, or one of those by hand (whose sizes are their own)."""
    schedule = BY_HAND.get(name)
    if schedule is None:
        return rich_plan(name, ranks, microbatches)
    return lowered(rich_job(schedule.stages, schedule.microbatches), schedule)
