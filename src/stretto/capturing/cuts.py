"""Where a job's stages begin, found again in another trace of the same model.

Places are known by what reads parameters: both forwards read the same parameters in the same order, and the
first such op of a stage begins it.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.capturing.graph import Traced
from stretto.errors import CaptureError
from stretto.ir.action import Phase
from stretto.ir.program import Job, Op
from stretto.passes.rows import read_of

Reading = tuple[str, str]
"""(module, parameter) of an op that reads a parameter."""


def cuts_of(traced: Traced, job: Job, refusal: str) -> list[int]:
    """The segments that begin stages 1, 2, ... of `job`. Raises CaptureError, `refusal`, where parameters are
    read in another order."""
    begun: list[tuple[int, Reading]] = [
        (stage.index, reading)
        for stage in job.stages
        for op in stage.ops[Phase.F]
        for reading in _readings(op)
    ]
    result: list[tuple[int, Reading]] = [
        (origin.segment, reading)
        for op, origin in traced.program.ops
        if not origin.backward and origin.segment is not None
        for reading in _readings(op)
    ]
    if [reading for _, reading in begun] != [reading for _, reading in result]:
        raise CaptureError(refusal)
    # A stage that reads no parameter begins where the next one does.
    return [
        min(
            (segment for (stage, _), (segment, _) in zip(begun, result, strict=True) if stage >= begins),
            default=len(traced.segments),
        )
        for begins in range(1, len(job.stages))
    ]


def _readings(op: Op) -> Sequence[Reading]:
    return [(op.module, name) for name in map(read_of, op.uses) if name is not None]
