"""What a job's ops take while systems are being timed, measured a while at a time; touches what it measures.

A machine that others use has another speed every minute, and not one speed: of two steps of one hour,
products of wide weights took 27 % less time in the first, and a small GPT 10 % more. So what was measured at
another time cannot be put in terms of now by any single step. Ops are measured again and again beside what is
timed instead: a plan's own, and those of jobs that shall price another, as a calibration before a run would,
with the linear layers of its sweep.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from stretto.cost.calibration import Calibration
from stretto.cost.measured import Compute, agreed_ops
from stretto.cost.op_cache import Timing, signature
from stretto.cost.profile import Profile, profile, random_tensor
from stretto.cost.roofline import sizes_of, specs_of, traffic_bytes
from stretto.cost.sweep import LINEAR_ROWS, LINEAR_SIZES, linear_ops
from stretto.cost.time_ops import machine_of
from stretto.ir.program import Job, TensorSpec

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
        average in this visit, in microseconds."""
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


class Layers:
    """Visits to the products of linear layers (`cost.sweep`); every rank makes one, and calls the same
    methods.

    1. A visit computes every `PARTS`-th product once; ranks compute the same ones at one time. Weights were
       last touched so many products ago, as in a step.
    2. A weight gradient is added to what its parameter has, as the runtime does.
    3. A product takes its thread's time, and as much longer as all of a visit's did by the clock: under a
       quota, or beside others on its core, a short one is seldom stopped, and then for long.
    """

    PARTS = 2

    def __init__(
        self, rows: Sequence[int] = LINEAR_ROWS, sizes: Sequence[tuple[int, int]] = LINEAR_SIZES
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        made: dict[tuple[object, ...], torch.Tensor] = {}

        def tensor(*key: object) -> torch.Tensor:
            if key not in made:
                spec = key[-1]
                assert isinstance(spec, TensorSpec)
                made[key] = random_tensor(spec, generator, CPU)
            return made[key]

        self._calls = []
        for op, specs in linear_ops(rows, sizes, "float32"):
            left, right, result = specs["x0"], specs["x1"], op.outputs[0]
            assert result is not None
            sums = tensor("sum", result) if left.stride is not None else None
            work = (op.flops, left.nbytes + right.nbytes + result.nbytes)
            operands = (tensor("left", left), tensor("right", right), sums)
            self._calls.append((signature(op, specs), operands, work))
        self._visits = 0
        self._found: dict[str, list[float]] = defaultdict(list)

    def visit(self) -> None:
        """Step 1."""
        if dist.is_initialized():
            dist.barrier()
        took: list[tuple[str, int]] = []
        with torch.no_grad():
            begin = time.perf_counter_ns()
            for key, (left, right, sums), _ in self._calls[self._visits % self.PARTS :: self.PARTS]:
                mine = time.thread_time_ns()
                if sums is None:
                    torch.mm(left, right)
                else:
                    torch.addmm(sums, left, right, out=sums)
                took.append((key, time.thread_time_ns() - mine))
            clock = time.perf_counter_ns() - begin
        stretch = max(1.0, clock / sum(ns for _, ns in took))
        self._visits += 1
        for key, ns in took:
            self._found[key].append(ns / 1e3 * stretch)

    def agreed(self) -> dict[str, Timing]:
        """Of all ranks, equal on all of them: the mean over visits, the median of ranks. After at least
        `PARTS` visits."""
        mine = {key: fmean(times) for key, times in self._found.items()}
        told: list[Any] = [mine]
        if dist.is_initialized():
            told *= dist.get_world_size()
            dist.all_gather_object(told, mine)
        return {
            key: Timing(median(one[key] for one in told), 0.0, *work)
            for key, _, work in self._calls
            if key in mine
        }


def calibration_of(
    found: Iterable[tuple[Job, OpTimes]], layers: Mapping[str, Timing] | None = None
) -> Calibration:
    """Jobs' op times as a calibration, with those of `layers` that no job has; ops of equal signature have
    the mean of their times."""
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
    return Calibration(machine_of(CPU), "jobs beside", {**(layers or {}), **timings})
