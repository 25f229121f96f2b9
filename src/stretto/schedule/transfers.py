"""What a message and a small collective cost: the formulas that bounds and the simulation share.

May touch `stretto.ir` only. Both sides must use the same formulas, or a bound could exceed a simulated step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stretto.ir.plan import Costs, Link
from stretto.ir.program import Job

BYTES_PER_MB = 10**6
"""The megabyte of `Link.processor_us_per_mb`, as that field defines it."""


def processor_us(link: Link, nbytes: int) -> float:
    """Processor time that each end of a message loses to it, in microseconds."""
    return link.processor_us_per_mb * nbytes / BYTES_PER_MB


def occupancy_us(link: Link, nbytes: int) -> float:
    """How long a message keeps its link, in microseconds, without latency (latency is pipelined).

    A transport that needs more processor time than wire time moves no faster than the processor does.
    """
    return max(nbytes / link.bytes_per_us, processor_us(link, nbytes))


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
    )


def all_reduce_us(link: Link, members: int, nbytes: int) -> float:
    """A ring all-reduce: every rank sends and receives 2 (n - 1) / n of the bytes.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
    """
    return link.latency_us + 2 * (members - 1) / members * occupancy_us(link, nbytes)


def tied_ranks(job: Job, stage_ranks: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Tied group -> the ranks that sum its gradient, for groups whose copies live on several ranks."""
    groups = {
        name: tuple(sorted({stage_ranks[stage] for stage in stages}))
        for name, stages in job.tied_groups().items()
    }
    return {name: ranks for name, ranks in groups.items() if len(ranks) > 1}


def tied_bytes(job: Job) -> Mapping[str, int]:
    """Tied group -> bytes of one copy of its gradient."""
    return {parameter.tied_to: parameter.grad_nbytes for parameter in job.parameters}


def op_time_us(costs: Costs, stage: int, name: str, free: bool) -> float | None:
    """The op's time; 0 for a view (`free`) that the costs do not name; None when a cost is missing."""
    found = costs.op_us.get((stage, name))
    return 0.0 if found is None and free else found
