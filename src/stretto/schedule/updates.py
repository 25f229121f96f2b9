"""Updates of parameters by the user's optimizer, where they are ops of the step (`Parallel.updates`).

Each gradient is final behind its last reduction. Those that end in one reduction are used by one update, and
so are small ones that no rank reduces; they are freed behind it. Where gradients are clipped, updates wait
for the norm of all of them (`stretto.schedule.norm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stretto.ir.action import Schedule
from stretto.ir.axes import PIPELINE
from stretto.ir.parameters import STATES
from stretto.ir.program import FREE, GRAD, PARAM, SHARD, Job, Op, Parameter, Ref
from stretto.ir.updates import update_op
from stretto.passes.flat import bucketed
from stretto.schedule.norm import norm_of


def updates_of(
    job: Job,
    schedule: Schedule,
    pp_rank: int,
    trained: Sequence[Parameter],
    last: Mapping[str, str],
    tied: Mapping[str, Sequence[int]],
) -> Iterator[Op]:
    """The updates of a pipeline rank. trained: of each tied group, the parameter whose gradient is that of
    all; last: tied group -> its last reduction, where there is one; tied: groups of which several pipeline
    ranks have copies."""
    together: dict[str, list[Parameter]] = {}
    for parameter in trained:
        if parameter.tied_to in last:
            together.setdefault(last[parameter.tied_to], []).append(parameter)
    alone = [parameter for parameter in trained if parameter.tied_to not in last]
    buckets = [*together.values(), *bucketed(alone, lambda one: one.grad_nbytes, lambda one: one.grad_dtype)]
    clipped = None
    if job.clip_norm is not None:
        counted = [[p for p in bucket if counts(p, pp_rank, tied)] for bucket in buckets]
        norm = list(norm_of(job, pp_rank, schedule.ranks, counted))
        yield from norm
        clipped = Ref(norm[-1].name), job.clip_norm
    for number, bucket in enumerate(buckets):
        stages = schedule.stages_of(pp_rank)
        pairs = [(GRAD + parameter.name, changed_by(job, stages, parameter)) for parameter in bucket]
        yield update_op(f"{PIPELINE}.update.{pp_rank}.{number}", pairs, STATES[job.optimizer], clipped)
        freed = tuple(gradient for gradient, _ in pairs)
        yield Op(f"{PIPELINE}.updated.{pp_rank}.{number}", FREE, (), writes=freed)


def counts(parameter: Parameter, pp_rank: int, tied: Mapping[str, Sequence[int]]) -> bool:
    """Whether a pipeline rank is the one whose gradient is counted in the norm."""
    return min(tied.get(parameter.tied_to, (pp_rank,))) == pp_rank


def changed_by(job: Job, stages: Sequence[int], parameter: Parameter) -> tuple[str, ...]:
    """All names by which a rank with these stages knows what an update of the tied group changes."""
    if parameter.is_made:
        return (SHARD + parameter.kept_as,)
    tied = (one for one in job.parameters if one.tied_to == parameter.tied_to)
    return tuple(PARAM + one.name for one in tied if any(stage in stages for stage in one.stages))
