"""Op times of other jobs, measured in the minutes in which one is timed.

A machine that others use has another speed every minute, and not one speed: of two steps of one hour,
products of wide weights took 27 % less time in the first, and a small GPT 10 % more. So what was measured
elsewhere cannot be put in terms of now by any single step. The jobs whose ops shall price another are
measured beside it instead, as a calibration before a run would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch
import torch.distributed as dist

from stretto.cost.calibration import Calibration
from stretto.cost.measured import Compute, agreed_ops
from stretto.cost.op_cache import Timing, signature
from stretto.cost.profile import Profile, profile
from stretto.cost.roofline import sizes_of, specs_of, traffic_bytes
from stretto.cost.time_ops import machine_of
from stretto.ir.program import Job

CPU = torch.device("cpu")

OpTimes = Mapping[tuple[int, str], float]


class Beside:
    """Jobs, and what their ops take. Every rank makes one of equal jobs, and calls the same methods."""

    def __init__(self, jobs: Sequence[Job], place: int) -> None:
        """place: of the calling rank in the pipeline; it measures that stage of each job."""
        self._jobs = list(jobs)
        self._place = place
        self._found: list[Profile | None] = [None] * len(self._jobs)

    def visit(self) -> None:
        """Measure all jobs once, one after the other."""
        for at, job in enumerate(self._jobs):
            if dist.is_initialized():
                dist.barrier()
            self._found[at] = profile(job, CPU, [self._place], self._found[at], least_rounds=1)

    def agreed(self) -> list[tuple[Job, OpTimes]]:
        """Jobs with what their ops took on average, equal on all ranks; after at least one visit."""
        result = []
        for job, mine in zip(self._jobs, self._found, strict=True):
            assert mine is not None, "no visit yet"
            result.append(
                (job, (agreed_ops(job, mine) if dist.is_initialized() else Compute(mine.op_us)).op_us)
            )
        return result


def calibration_of(found: Iterable[tuple[Job, OpTimes]]) -> Calibration:
    """Jobs' op times as a calibration; ops of equal signature have the mean of their times."""
    times: dict[str, list[float]] = defaultdict(list)
    work: dict[str, tuple[int, int]] = {}
    for job, op_us in found:
        specs, sizes = specs_of(job), sizes_of(job)
        for stage in job.stages:
            for ops in stage.ops.values():
                for op in ops:
                    us = op_us.get((stage.index, op.name))
                    if us:
                        key = signature(op, specs)
                        times[key].append(us)
                        work[key] = (op.flops, traffic_bytes(op, sizes))
    timings = {key: Timing(fmean(took), 0.0, *work[key]) for key, took in sorted(times.items())}
    return Calibration(machine_of(CPU), "jobs beside", timings)
