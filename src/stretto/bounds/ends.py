"""What follows the last ops of a step, for bounds: the loss is told, and gradients are summed.

A gradient is summed first along the axes on
which it is partial, then over its ties, then over data-parallel ranks (`schedule.sums`); a sum begins when
every op that adds to one of its gradients has ended, for all microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.action import Phase, Schedule
from stretto.ir.costs import Costs
from stretto.ir.plan import Communicator
from stretto.ir.program import STEP_LOSS, Job, Op
from stretto.ir.transfers import CollectiveTime, collective_time
from stretto.schedule.sums import communicators_of, with_sums


@dataclass(frozen=True, slots=True)
class SumTime:
    """Gradients that are summed together and what that takes. axis: of its communicator, `pp` for ties."""

    name: str
    axis: str
    time: CollectiveTime


@dataclass(frozen=True, slots=True)
class End:
    """Ops of a stage, by number, after which sums follow one after the other; `us` in all (with no sums:
    of the loss)."""

    ops: tuple[int, ...]
    sums: tuple[SumTime, ...]
    us: float


def ends_of(
    job: Job, stage_ranks: Sequence[int], costs: Costs, numbers: Sequence[Mapping[str, int]]
) -> list[list[End]]:
    """The ends of every stage. numbers: by stage, op name -> number.

    Raises PlanError for a collective that has no cost.
    """
    places = sorted(set(stage_ranks))
    empty: tuple[tuple[()], ...] = tuple(() for _ in range(1 + max(places)))
    where = Schedule("", len(stage_ranks), job.microbatches, tuple(stage_ranks), empty)
    summing = with_sums(job, where)
    communicators = {found.name: found for found in communicators_of(job, where)}
    chains: list[dict[str, tuple[SumTime, ...]]] = []
    for place in range(where.ranks):
        chain: dict[str, tuple[SumTime, ...]] = defaultdict(tuple)
        for op in (
            op for s in where.stages_of(place) for op in summing.stages[s].ops.get(Phase.REDUCE_GRAD, ())
        ):
            for group in op.sums:
                chain[group] += (_sum_time(costs, job, communicators[op.lane], op),)
        chains.append(chain)
    adding: list[dict[tuple[SumTime, ...], dict[int, None]]] = [defaultdict(dict) for _ in job.stages]
    for parameter in job.parameters:
        for stage, _, value in parameter.grads:
            followed = chains[stage_ranks[stage]].get(parameter.tied_to, ())
            if followed and value in numbers[stage]:
                adding[stage][followed][numbers[stage][value]] = None
    ends = [
        [End(tuple(ops), followed, sum(s.time.us for s in followed)) for followed, ops in of.items()]
        for of in adding
    ]
    stage, value = job.loss
    if STEP_LOSS in chains[stage_ranks[stage]] and value in numbers[stage]:
        [told] = chains[stage_ranks[stage]][STEP_LOSS]
        ends[stage].append(End((numbers[stage][value],), (), told.time.us))
    return ends


def _sum_time(costs: Costs, job: Job, communicator: Communicator, op: Op) -> SumTime:
    assert op.collective is not None
    return SumTime(op.name, communicator.axes[0], collective_time(costs, job, communicator, op.collective))
