"""Random programs to plan: graphs, layouts of 2 to 8 ranks, schedules, costs and modes, each from one number.

Schedules are a family's, or drawn: stages anywhere, several on a rank, any order of actions in which each
comes after what it needs, with pairs of actions that do not need each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

from stretto.ir.action import Action, Overlap, Phase, Schedule, Slot
from stretto.ir.costs import CollectiveCost, Costs, Link
from stretto.ir.curve import Curve
from stretto.ir.plan import Plan
from stretto.ir.program import OVERLAP_MODES, WAIT, Job, OverlapMode
from stretto.planning.make_plan import make_plan
from stretto.schedule.families import FAMILIES, make_schedule
from tests.verifying.random_graphs import KINDS, random_axes, random_job

MOST_RANKS = 8


@dataclass(frozen=True)
class Program:
    """What planning is given. order: the policy that orders windows."""

    job: Job
    costs: Costs
    schedule: Schedule
    overlap: OverlapMode
    order: str

    def plan(self) -> Plan:
        return make_plan(self.job, self.costs, schedule=self.schedule, overlap=self.overlap, order=self.order)


@cache
def random_program(seed: int) -> Program:
    """The program of a number: always the same one."""
    draw = Random(seed)
    places, axes = 1, ()
    while places == 1 and not axes:
        places = draw.choice((1, 1, 2, 2, 3, 4, 6, 8))
        axes = random_axes(draw, MOST_RANKS // places)
    stages = places if draw.random() < 0.6 else draw.randint(places, min(2 * places, 6) if places < 6 else 8)
    microbatches = draw.randint(1, 5)
    job = random_job(draw, stages, microbatches, axes)
    each, uneven = divmod(stages, places)
    families = [] if uneven else [name for name in sorted(FAMILIES) if FAMILIES[name].places.allow(each)]
    if families and draw.random() < 0.7:
        schedule = make_schedule(draw.choice(families), places, microbatches, virtual_stages=each)
    else:
        schedule = random_schedule(draw, stages, microbatches, places)
    order = draw.choice(("improve", "list", "list", "captured"))
    return Program(job, random_costs(draw, job, places), schedule, draw.choice(OVERLAP_MODES), order)


@cache
def random_plan(seed: int) -> Plan:
    """The plan of a number's program."""
    return random_program(seed).plan()


def random_schedule(draw: Random, stages: int, microbatches: int, places: int) -> Schedule:
    """A walk over what can run: at every step one rank runs one action, or two that are both ready."""
    home = [*range(places), *(draw.randrange(places) for _ in range(stages - places))]
    draw.shuffle(home)
    split = [draw.random() < 0.4 for _ in range(stages)]
    """Stages of which W is an action of its own."""
    pairs = draw.choice((0.0, 0.3, 0.8))
    left = {
        Action(s, phase, m)
        for s in range(stages)
        for m in range(microbatches)
        for phase in ((Phase.F, Phase.I, Phase.W) if split[s] else (Phase.F, Phase.B))
    }
    done: set[tuple[int, Phase, int]] = set()
    orders: list[list[Slot]] = [[] for _ in range(places)]

    def ready(action: Action) -> bool:
        s, m = action.stage, action.microbatch
        if action.phase is Phase.F:
            return s == 0 or (s - 1, Phase.F, m) in done
        if action.phase is Phase.W:
            return (s, Phase.I, m) in done
        return (s, Phase.F, m) in done and (s == stages - 1 or (s + 1, Phase.I, m) in done)

    while left:
        rank = draw.randrange(places)
        can = sorted(action for action in left if home[action.stage] == rank and ready(action))
        if not can:
            continue
        taken = [draw.choice(can)]
        others = [a for a in can if (a.stage, a.microbatch) != (taken[0].stage, taken[0].microbatch)]
        if others and draw.random() < pairs:
            taken.append(draw.choice(others))
        orders[rank].append(taken[0] if len(taken) == 1 else Overlap(tuple(taken)))
        for action in taken:
            left.remove(action)
            done.update((action.stage, sub, action.microbatch) for sub in action.phase.programs)
    return Schedule("drawn", stages, microbatches, tuple(home), tuple(map(tuple, orders)))


def random_costs(draw: Random, job: Job, places: int) -> Costs:
    """Costs between nothing and much; some links are faster than others."""
    us = draw.choice(((100.0,), (0.0, 10.0, 100.0, 400.0), (1.0, 1000.0)))
    times = {
        (stage.index, op.name): draw.choice((0.0, 5.0)) if op.collective else draw.choice(us)
        for stage in job.stages
        for ops in stage.ops.values()
        for op in ops
        if op.target != WAIT
    }

    def collective() -> CollectiveCost:
        first = draw.choice((0.0, 50.0, 500.0))
        curve = Curve(((0.0, first), (float(64 * 8 * 4), first + draw.choice((0.0, 100.0)))))
        return CollectiveCost(curve, draw.choice((0.0, 10.0)), draw.choice((0.0, 0.3)), "made up")

    def link() -> Link:
        return Link(draw.choice((0.0, 30.0, 300.0)), draw.choice((float("inf"), 100.0, 1.0)))

    sizes = {axis: size for axis, size in job.axes if size > 1}
    return Costs(
        times,
        {(a, b): link() for a in range(places) for b in range(places) if a != b and draw.random() < 0.3},
        link(),
        draw.choice((0.0, 20.0)),
        "made up",
        {(axis, kind): collective() for axis in sizes for kind in KINDS},
        tuple(axis for axis in sizes if draw.random() < 0.3),
    )
