"""Another batch, captured as a job was: the same model, loss and settings, cut into the same stages.

1. Microbatches are those of the job where rows divide by them, else the most below.
2. What planning chose (stages, chunks, a schedule) is what the plan of the first shape has.
3. Stages begin where those of the job begin (`stretto.capturing.cuts`), so that each parameter stays on its
   ranks; what is computed follows the new shapes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stretto.batch import tree
from stretto.batch.dims import marked
from stretto.capturing.captures import Captures
from stretto.config import ParallelSettings
from stretto.errors import UsageError
from stretto.ir.action import Schedule, Slot
from stretto.ir.program import Job
from stretto.ir.recipe import PlannedJob
from stretto.ir.stage_maps import AUTO, is_own


def captured_again(
    captures: Captures,
    parallel: ParallelSettings,
    job: Job,
    batch: Any,
    microbatches: int | None,
    like: PlannedJob | None,
) -> Job:
    """The job of another batch. captures, parallel: those of `job`. See `Job.with_batch`."""
    if like is None and (job.forms or job.schedule == AUTO):
        raise UsageError(
            "planning chooses stages, chunks or the schedule of this job, and another shape needs the same: "
            "give the plan of the first, job.with_batch(batch, like=plan)"
        )
    batch = marked(batch, dict(job.batch_dims))
    first: Job = job if like is None else like.job
    count = microbatches or _most_microbatches(batch, parallel)
    changed = parallel.model_copy(update={"microbatches": count})
    again = replace(captures, batch=batch, like=first)
    degree = first.chunks if parallel.ampipe_degree == "auto" else None
    made = again.job(changed, len(first.stages), degree)
    if like is not None and (
        not isinstance(job.schedule, str) or job.schedule == AUTO or is_own(job.schedule)
    ):
        made = replace(made, schedule=_of_fewer(like.schedule, count))
    return made


def _of_fewer(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without the microbatches that are not there: what is left waits for nothing new."""

    def kept(slot: Slot) -> Slot | None:
        left = tuple(action for action in slot.actions if action.microbatch < microbatches)
        return slot if len(left) == len(slot.actions) else left[0] if left else None

    if microbatches >= schedule.microbatches:
        return schedule
    orders = (tuple(one for one in map(kept, order) if one is not None) for order in schedule.orders)
    return replace(schedule, microbatches=microbatches, orders=tuple(orders))


def _most_microbatches(batch: Any, parallel: ParallelSettings) -> int:
    """Step 1."""
    rows = tree.rows(batch)
    for count in range(parallel.microbatches, 0, -1):
        if rows % (count * parallel.dp) == 0:
            return count
    raise UsageError(
        f"a batch of {rows} rows cannot be shared by dp = {parallel.dp} copies, of which each takes as many: "
        f"give a multiple of {parallel.dp} rows (fill up with rows whose labels do not count, and return "
        "(sum, count) from the loss)"
    )
