"""What follows the last ops of a step, for bounds: the loss is told, and gradients are summed.

May touch `stretto.ir` and `schedule.sums`. A gradient is summed first along the axes on
which it is partial, then over its ties, then over data-parallel ranks (`schedule.sums`); a sum begins when
every op that adds to a gradient of its bucket has ended, for all microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.ir.action import Schedule
from stretto.ir.axes import sums_of
from stretto.ir.costs import Costs
from stretto.ir.plan import Bucket, Communicator
from stretto.ir.program import Job
from stretto.ir.transfers import CollectiveTime, bucket_bytes, bucket_time, loss_time
from stretto.schedule.sums import communicators_of, make_sums, tells_loss


@dataclass(frozen=True, slots=True)
class SumTime:
    """A bucket of gradients and what its sum takes. axis: of its communicator, `pp` for ties."""

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
    sums = make_sums(job, where)
    communicators = {found.name: found for found in communicators_of(job, where)}
    sizes = bucket_bytes(job, sums.buckets)
    chains: list[dict[str, tuple[SumTime, ...]]] = []
    for place in range(where.ranks):
        here = {*sums.early[place], *(name for names in sums.late[place] for name in names)}
        chain: dict[str, list[Bucket]] = defaultdict(list)
        for bucket in sums.buckets:
            for group in bucket.parameters if bucket.name in here else ():
                chain[group].append(bucket)
        times = {bucket.name: _sum_time(costs, communicators, sizes, bucket) for bucket in sums.buckets}
        chains.append(
            {
                group: tuple(times[b.name] for b in sorted(buckets, key=lambda b: _turn(communicators, b)))
                for group, buckets in chain.items()
            }
        )
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
    if tells_loss(job, len(places)) and value in numbers[stage]:
        ends[stage].append(End((numbers[stage][value],), (), loss_time(costs, job, places).us))
    return ends


def _turn(communicators: Mapping[str, Communicator], bucket: Bucket) -> int:
    """Which of a gradient's sums comes when."""
    return sums_of(communicators[bucket.communicator].axes[0])


def _sum_time(
    costs: Costs, communicators: Mapping[str, Communicator], sizes: Mapping[str, int], bucket: Bucket
) -> SumTime:
    communicator = communicators[bucket.communicator]
    return SumTime(bucket.name, communicator.axes[0], bucket_time(costs, communicator, sizes[bucket.name]))
