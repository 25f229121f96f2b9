"""Planning's part of recomputation: the job that is planned, its costs, and the limit that the plan keeps.

What is repeated is for `stretto.passes.recompute_choice`; this room gives jobs whose ops have costs to who
plans them, so that their memory is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.prices import Prices
from stretto.ir.program import Job
from stretto.passes.recompute_choice import recompute


def recomputed(
    job: Job,
    prices: Prices,
    schedule: Schedule,
    max_bytes: int | None,
    peaks: Callable[[Job, Costs], Sequence[int]],
) -> tuple[Job, int | None]:
    """The job with what `job.recompute` asks for, and the most bytes of a rank.

    peaks: the most bytes of each rank when a job is planned. Raises PlanError when a limit cannot be kept.
    """

    def peaks_of(made: Job) -> Sequence[int]:
        return peaks(made, prices.costs_of(made))

    made = recompute(job, job.recompute, prices.costs_of(job), schedule, peaks_of)
    limits = [limit for limit in (job.recompute, max_bytes) if isinstance(limit, int)]
    return made, min(limits, default=None)
