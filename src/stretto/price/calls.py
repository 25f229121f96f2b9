"""What a collective takes on the compute lane: the call that starts it, and what its wait has left to do.

    1. The start takes a while for a collective of any size, and grows with the bytes that the transport takes
       over before it returns (copies, a first write). What its own threads do is a loss of compute
       (`cost.contention`).
    2. Once the collective is done, its wait may have work of its own (a transport that adds up the rows of a
       reduce-scatter on the thread that waits), and whoever reads the result first reads what others wrote:
       no cache of this core has it. Both grow with the bytes.

Touches `stretto.ir` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.files.codec import Amount
from stretto.ir.costs import BYTES_PER_MB
from stretto.ir.program import WAIT, Job


@dataclass(frozen=True, slots=True)
class Calls:
    """start_us, start_us_per_mb: of the call that starts a collective; finish_us, finish_us_per_mb: of the
    wait for one that is done. Microseconds, and microseconds for each 10**6 bytes of the whole tensor."""

    start_us: Amount
    start_us_per_mb: Amount = 0.0
    finish_us_per_mb: Amount = 0.0
    finish_us: Amount = 0.0

    def starting_us(self, nbytes: float) -> float:
        """What the call that starts takes, in microseconds, for a whole tensor of `nbytes`."""
        return self.start_us + self.start_us_per_mb * nbytes / BYTES_PER_MB

    def finishing_us(self, nbytes: float) -> float:
        """What is left to do when it is done, in microseconds, for a whole tensor of `nbytes`."""
        return self.finish_us + self.finish_us_per_mb * nbytes / BYTES_PER_MB


def line_through(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(microseconds whatever the size, microseconds a megabyte) from (bytes, microseconds): a line through
    the least and the most bytes, never falling."""
    (least, low_us), (most, high_us) = min(samples), max(samples)
    per_byte = max(0.0, high_us - low_us) / (most - least) if most > least else 0.0
    return max(0.0, low_us - per_byte * least), per_byte * BYTES_PER_MB


def calls_us(job: Job, calls: Mapping[tuple[str, str], Calls]) -> dict[tuple[int, str], float]:
    """(stage, op name) -> microseconds on the compute lane, for every op that starts a collective or waits
    for one. calls: by (axis, kind); collectives that it does not name are left out."""
    result: dict[tuple[int, str], float] = {}
    for stage in job.stages:
        ops = [op for made in stage.ops.values() for op in made]
        asked = {op.name: op.collective for op in ops if op.collective is not None}
        for op in ops:
            collective = asked.get(op.uses[0]) if op.target == WAIT and op.uses else op.collective
            known = calls.get((collective.axis, collective.kind)) if collective is not None else None
            if collective is None or known is None:
                continue
            waits, nbytes = op.target == WAIT, collective.nbytes
            result[stage.index, op.name] = known.finishing_us(nbytes) if waits else known.starting_us(nbytes)
    return result
