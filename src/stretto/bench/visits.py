"""What a job's ops take while systems are being timed, measured a while at a time; touches what it measures.

A machine that others use has another speed every minute, and not one speed: of two steps of one hour,
products of wide weights took 27 % less time in the first, and a small GPT 10 % more. So what was measured at
another time cannot be put in terms of now by any single step. Ops are measured again and again beside what is
timed instead: a plan's own, and those of jobs that shall price another, as a calibration before a run would
(which has linear layers as well: `stretto.bench.layers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import torch
import torch.distributed as dist

from stretto.ir.program import Job
from stretto.measure.measured import Compute, agreed_ops
from stretto.measure.profile import Profile, profile
from stretto.measure.time_ops import machine_of
from stretto.price.alike import timings_of
from stretto.price.calibration import Calibration
from stretto.price.op_cache import Timing

CPU = torch.device("cpu")

OpTimes = Mapping[tuple[int, str], float]


class Visits:
    """Of one job; every rank makes one, and calls the same methods. The rounds of all visits count alike."""

    def __init__(self, job: Job, stages: Sequence[int], rounds: int = 1) -> None:
        """stages: those of the calling rank. rounds: of each visit, or more of short programs."""
        self.job = job
        self._stages = stages
        self._rounds = rounds
        self._found: Profile | None = None

    def visit(self) -> float:
        """All ranks measure the ops of their stages together. Returns what a microbatch of these took on
        average in this visit, in microseconds; equal stages count once."""
        if dist.is_initialized():
            dist.barrier()
        before = self._found
        self._found = profile(self.job, CPU, self._stages, before, least_rounds=self._rounds)
        took_us = 0.0
        for stage, of in self._found.rounds.items():
            for phase, totals in of.totals.items():
                old = len(before.rounds[stage].totals[phase]) if before is not None else 0
                took_us += fmean(totals[old:])
        return took_us

    @property
    def found(self) -> Profile:
        """Of the calling rank; after at least one visit."""
        assert self._found is not None, "no visit yet"
        return self._found

    def agreed(self) -> Compute:
        """Of all ranks, equal on all of them; after at least one visit."""
        return agreed_ops(self.job, self.found) if dist.is_initialized() else Compute(self.found.op_us)


def calibration_of(
    found: Iterable[tuple[Job, OpTimes]], layers: Mapping[str, Timing] | None = None
) -> Calibration:
    """Jobs' op times as a calibration, with those of `layers` that no job has; ops of equal signature have
    the mean of their times."""
    took = ((job, {op: us for op, us in op_us.items() if us}) for job, op_us in found)
    timings = timings_of(took)
    return Calibration(machine_of(CPU), "jobs beside", {**(layers or {}), **timings})
