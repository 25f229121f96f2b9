"""What ops read of parameters is made once a step (UNSHARD): of rows that ranks keep, the full parameter is
gathered; of one in another dtype, a copy is made (Rajbhandari et al., "ZeRO", 2020).

In the order in which the rank's stages read them. Copies in the dtype of the computation are made first, so
that half as much travels in bfloat16; one op makes those of a stage, or of what travels together. Large
parameters are gathered by themselves; small ones that follow each other share a bucket. Over several axes one
gather follows the other, that over the last axis first: each rank then has rows of its neighbours.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from stretto.ir.action import Phase
from stretto.ir.axes import PIPELINE
from stretto.ir.program import PARAM, SHARD, Job, Op, Parameter
from stretto.passes.owners import gathered_bucket
from stretto.passes.rows import buckets_of, gathered, in_dtype


def gathers_of(job: Job, stages: Sequence[int], pp_rank: int) -> Iterator[Op]:
    """The program of a pipeline rank that has these stages."""
    groups = [group for group in _needed(job, stages) if group[0].is_made]
    alike: dict[object, list[Parameter]] = defaultdict(list)
    for parameter in (parameter for group in groups if not group[0].kept for parameter in group):
        first = min(stage for stage in parameter.stages if stage in stages)
        alike[first, parameter.own_dtype, parameter.spec.dtype].append(parameter)
    for number, copied in enumerate(alike.values()):
        yield from in_dtype(
            f"{PIPELINE}.made.{pp_rank}.{number}",
            [SHARD + parameter.tied_to for parameter in copied],
            [parameter.spec for parameter in copied],
            [(PARAM + parameter.name,) for parameter in copied],
        )
    numbers: Counter[str] = Counter()
    for bucket in buckets_of([group for group in groups if group[0].kept]):
        axis = bucket[0][0].kept[-1]
        by = gathered if bucket[0][0].slot is None else gathered_bucket
        yield from by(job, f"{axis}.unshard.{pp_rank}.{numbers[axis]}", bucket, writes=True).tail
        numbers[axis] += 1


def _needed(job: Job, stages: Sequence[int]) -> list[list[Parameter]]:
    """Tied groups that these stages read, in that order."""
    groups: dict[str, list[Parameter]] = {}
    known = {PARAM + parameter.name: parameter for parameter in job.parameters}
    read = dict.fromkeys(
        name
        for phase in (Phase.F, Phase.I, Phase.W)
        for stage in sorted(stages, reverse=phase is not Phase.F)
        for op in job.stages[stage].ops[phase]
        for name in op.uses
        if name in known
    )
    for name in read:
        groups.setdefault(known[name].tied_to, []).append(known[name])
    return list(groups.values())
