"""What a collective takes on the compute lane: the call that starts it, and what its wait has left to do.

    1. The start is the same for all sizes: what the transport does with the bytes is a loss of compute
       (`cost.contention`).
    2. Once the collective is done, its wait may have work of its own (a transport that adds up the rows of a
       reduce-scatter on the thread that waits); it grows with the bytes.

Touches `stretto.ir` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.ir.program import WAIT, Job

BYTES_PER_MB = 10**6
"""The megabyte of `CollectiveCost.processor_us_per_mb`, as that field defines it, and of `Calls`."""


@dataclass(frozen=True, slots=True)
class Calls:
    """start_us: of the call that starts a collective, in microseconds; finish_us_per_mb: of the wait for one
    that is done, in microseconds for each 10**6 bytes of the whole tensor."""

    start_us: float
    finish_us_per_mb: float = 0.0

    def finish_us(self, nbytes: float) -> float:
        """What the wait has left to do, in microseconds, for a whole tensor of `nbytes`."""
        return self.finish_us_per_mb * nbytes / BYTES_PER_MB


def calls_us(job: Job, calls: Mapping[tuple[str, str], Calls]) -> dict[tuple[int, str], float]:
    """(stage, op name) -> microseconds on the compute lane, for every op that starts a collective or waits
    for one. calls: by (axis, kind); collectives that it does not name are left out."""
    found: dict[tuple[int, str], float] = {}
    for stage in job.stages:
        ops = [op for made in stage.ops.values() for op in made]
        asked = {op.name: op.collective for op in ops if op.collective is not None}
        for op in ops:
            collective = asked.get(op.uses[0]) if op.target == WAIT and op.uses else op.collective
            known = calls.get((collective.axis, collective.kind)) if collective is not None else None
            if collective is None or known is None:
                continue
            waits = op.target == WAIT
            found[stage.index, op.name] = known.finish_us(collective.nbytes) if waits else known.start_us
    return found
