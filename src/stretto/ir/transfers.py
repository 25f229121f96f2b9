"""What messages and collectives cost: the formulas that bounds and the simulation share.

Both sides must use the same formulas, or a bound could exceed a simulated step.
What joins pipeline ranks goes by links. These say nothing of the ranks that share one, so collectives of
other axes need curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stretto.errors import PlanError
from stretto.ir.collectives import ALL_REDUCE, Collective
from stretto.ir.costs import BYTES_PER_MB, CollectiveCost, Costs, Link
from stretto.ir.plan import LOSS, Communicator
from stretto.ir.program import FREE, GETITEM, WAIT, Job, Op

SUM = ALL_REDUCE.name
"""The kind of every sum of gradients, and of the loss where data-parallel ranks share it."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """What one collective takes when it has its links for itself.

    us: from the call that starts it to its end; latency_us: the part of it that keeps no network card busy.
    processor: share of every member's processor that it takes; slowdown: share of the compute lane's speed
        that is lost besides that, however long it takes. Both are 0 or more.
    """

    us: float
    latency_us: float = 0.0
    processor: float = 0.0
    slowdown: float = 0.0

    @property
    def load(self) -> float:
        """Share of the compute lane's speed that is lost while it goes at its full rate."""
        return self.processor + self.slowdown

    def __add__(self, after: CollectiveTime) -> CollectiveTime:
        """One collective after the other, as one: processor time is spread over both."""
        us = self.us + after.us
        if not us:
            return self

        def mean(one: float, other: float) -> float:
            return (one * self.us + other * after.us) / us

        return CollectiveTime(
            us,
            self.latency_us + after.latency_us,
            mean(self.processor, after.processor),
            mean(self.slowdown, after.slowdown),
        )


def processor_us(link: Link, nbytes: int) -> float:
    """Processor time that each end of a message loses to it, in microseconds."""
    return link.processor_us + link.processor_us_per_mb * nbytes / BYTES_PER_MB


def occupancy_us(link: Link, nbytes: int) -> float:
    """How long a message keeps its link, in microseconds, without latency (latency is pipelined).

    A transport that needs more processor time than wire time moves no faster than the processor does.
    """
    return max(link.start_us + nbytes / link.bytes_per_us, processor_us(link, nbytes))


def message_us(link: Link, nbytes: int) -> float:
    """From the start of a message that has the link for itself to its use at the receiver."""
    return link.latency_us + occupancy_us(link, nbytes)


def slowest_link(costs: Costs, ranks: Sequence[int]) -> Link:
    """A link with the longest latency, the lowest rate and the most processor time found between `ranks`."""
    links = [costs.link(a, b) for a in ranks for b in ranks if a != b]
    return Link(
        max(link.latency_us for link in links),
        min(link.bytes_per_us for link in links),
        max(link.processor_us_per_mb for link in links),
        "the slowest of the group",
        max(link.start_us for link in links),
        max(link.processor_us for link in links),
    )


def axis_time(costs: Costs, axis: str, kind: str, nbytes: int) -> CollectiveTime:
    """A collective of an axis other than pp, of `nbytes` (of the full tensor). Raises PlanError when the
    costs have none."""
    result = costs.collectives.get((axis, kind))
    if result is None:
        fault = f"{kind} on {axis!r} has no cost: links join pipeline ranks and say nothing of {axis}"
        raise PlanError("collectives without a cost; cost the job for this mesh again", [fault])
    return _time(result, nbytes)


def sum_time(costs: Costs, pp_ranks: Sequence[int], nbytes: int) -> CollectiveTime:
    """The reduction of a gradient of `nbytes` over pipeline ranks, as a ring over the slowest link between
    them: every rank sends and receives 2 (n - 1) / n of the bytes.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    link = slowest_link(costs, pp_ranks)
    if not nbytes:
        return CollectiveTime(message_us(link, 0), link.latency_us)
    moved = ALL_REDUCE.moved(len(pp_ranks))
    us, lost_us = link.latency_us + moved * occupancy_us(link, nbytes), moved * processor_us(link, nbytes)
    return CollectiveTime(us, link.latency_us, lost_us / us if lost_us else 0.0)


def loss_time(costs: Costs, job: Job, pp_ranks: Sequence[int]) -> CollectiveTime:
    """Telling the loss to all ranks: over the data-parallel ranks (a sum of one number) and then, at the
    slowest latency, over the pipeline ranks.

    Raises PlanError when there are data-parallel ranks and no cost of their collectives.
    """
    total = CollectiveTime(0.0)
    for axis in job.data_axes:
        total += axis_time(costs, axis, SUM, job.loss_spec.nbytes)
    return total + sum_time(costs, pp_ranks, 0) if len(pp_ranks) > 1 else total


def collective_time(costs: Costs, job: Job, communicator: Communicator, asked: Collective) -> CollectiveTime:
    """What an op starts on a communicator. Raises PlanError as `axis_time` does."""
    if communicator.name == LOSS:
        return loss_time(costs, job, communicator.ranks)
    if communicator.joins_pp_ranks:
        return sum_time(costs, communicator.ranks, asked.nbytes)
    return axis_time(costs, communicator.name, asked.kind, asked.nbytes)


def _time(cost: CollectiveCost, nbytes: int) -> CollectiveTime:
    lost_us = cost.lost_us(nbytes)
    # As with messages: it moves no faster than the processor does.
    us = max(cost.curve.us(nbytes), lost_us)
    processor = lost_us / us if lost_us else 0.0
    return CollectiveTime(us, min(us, cost.curve.us(0)), processor, cost.slowdown)


def tied_ranks(job: Job, stage_ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Tied group -> the ranks that have a copy, for groups that are on several ranks and have a gradient to
    sum (a rank may keep a copy and add nothing: it reads the sum)."""
    ranks: dict[str, set[int]] = {}
    for parameter in job.parameters:
        ranks.setdefault(parameter.tied_to, set()).update(stage_ranks[stage] for stage in parameter.stages)
    summed = {parameter.tied_to for parameter in job.parameters if parameter.grads}
    return {name: tuple(sorted(on)) for name, on in ranks.items() if len(on) > 1 and name in summed}


def is_free(op: Op) -> bool:
    """Whether an op may be without a cost: views, waits and parts of tuples take no time of their own."""
    return op.alias is not None or op.target in (GETITEM, WAIT, FREE)


def time_of(costs: Costs, stage: int, op: Op) -> float:
    """The op's time on the compute lane, microseconds; 0 for one that the costs do not name."""
    return costs.op_us.get((stage, op.name), 0.0)


def missing_times(costs: Costs, stage: int, ops: Iterable[Op]) -> list[str]:
    """A fault for each op that has no time."""
    return [
        f"stage {stage}'s op {op.name} has no time; cost the job again"
        for op in ops
        if (stage, op.name) not in costs.op_us and not is_free(op)
    ]
