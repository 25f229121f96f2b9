"""What a job costs where it will run, and what prices the ops that passes make of it.

"local" is measured on this machine (`stretto.measure`): what passes make is then priced by what is like it.
All else is described (`stretto.price.cluster`), and priced in the same way as the job itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.ir.action import Schedule
from stretto.ir.costs import Costs
from stretto.ir.prices import Prices
from stretto.ir.program import Job
from stretto.measure.measured import Measuring, memory_here
from stretto.price.alike import ListedPricer
from stretto.price.cluster import Cluster, Description, describe, described
from stretto.price.cluster_file import Hardware


def costs_of(job: Job, schedule: Schedule, cluster: str | Description) -> Costs:
    """The costs of a job on a cluster: "local" to measure on this machine; a description; or the name or file
    of one, see `stretto.price.cluster.describe`.

    Raises UsageError for an unknown name, a file that cannot be read, a job that does not fit.
    """
    return prices_of(job, schedule, describe(cluster)).costs_of(job)


def prices_of(job: Job, schedule: Schedule, description: Description | None) -> Prices:
    """The price lists of a job, and of what passes make of it; measured where there is no description.

    Under torchrun all ranks must call it then. Raises UsageError for a job that does not fit.
    """
    return pricing((job,), (schedule,), description)(job)


def pricing(
    jobs: Sequence[Job], schedules: Sequence[Schedule], description: Description | None
) -> Callable[[Job], Prices]:
    """What gives the price lists of one of several jobs, each with its schedule, as `prices_of` does. Where
    they are measured, communication is so once, for all jobs; the ops of a job when its turn comes."""
    if description is None:
        measuring = Measuring(jobs, schedules)
        return lambda job: listed(job, measuring.costs_of(job))

    def one(job: Job) -> Prices:
        schedule = next(schedule for other, schedule in zip(jobs, schedules, strict=True) if other is job)
        costs, pricer = described(job, schedule, description)
        return Prices(job, costs, pricer, keep=False)

    return one


def listed(job: Job, costs: Costs) -> Prices:
    """Price lists by given costs of a job: what passes make of it is priced by what is like it."""
    return Prices(job, costs, ListedPricer(job, costs), keep=True)


def memory_limit(description: Description | None, job: Job) -> int | None:
    """Bytes of a device that a plan must fit in: as described, or of the devices here when there is no
    description. None where neither sets a limit: a calibration says nothing of it, and ranks on processors
    share what there is with others.

    Under torchrun all ranks must call it. Raises UsageError when this machine lacks a device of the job's
    kind.
    """
    if description is None:
        return memory_here(job)
    return description.memory_bytes if isinstance(description, (Cluster, Hardware)) else None
