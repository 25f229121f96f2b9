"""Rehearsal: one rank of a plan on one device, alone. Its compute is real; its communication takes the time
that the plan predicts (`runtime.emulated_transport`, on accelerators `runtime.emulated_cuda`).

1. Parameters, buffers and the batch: from the model and batch if they are given, else made up (below); and
   memory as the optimizer's state takes, which nothing reads.
2. A step to warm up, in which peak memory is counted; then the steps that count.
3. The step in the middle by time is reported, with the pipeline ranks of the simulation that answered.

Made up are values that neither vanish nor grow, however many layers there are (`docs/rehearse.md`); integers
of a batch name what they reach (`stretto.ir.integers`), and those of buffers are 0, which is a valid index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.ir.integers import rows_named
from stretto.ir.kept import shard_spec
from stretto.ir.plan import Plan
from stretto.ir.program import Job, TensorSpec
from stretto.ir.timeline import COMPUTE_LANE, SpanKind, Timeline, without_closing_waits
from stretto.measure.measured import device_of
from stretto.runtime.compare import line, rank_lines
from stretto.runtime.emulated_cuda import CudaTransport
from stretto.runtime.emulated_transport import EmulatedTransport
from stretto.runtime.fit import explaining_failed_ops, fit_batch
from stretto.runtime.memory_adapter import MemoryMeter
from stretto.runtime.rank import RankState
from stretto.runtime.record import compute_spans, gap_spans
from stretto.runtime.runner import Runner
from stretto.runtime.updates import like, made_up_optimize
from stretto.simulating import simulate
from stretto.verifying import verify
from stretto.verifying.memory import bytes_throughout

End = EmulatedTransport | CudaTransport
Kept = tuple[torch.Tensor, ...]

LONGEST_US = 3600e6
"""A step that is longer is no step of training, but a cost that is wrong. Assumed."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one rank did alone. Times are microseconds of the step in the middle, by time, of `steps_us`.

    step_us: from the step's start until the last pipeline rank's end, this one's real, the others' simulated.
    exposed_us: axis -> time for which the compute lane stalled for a communication under way. bubble_us: for
    one that had not begun, or for the step's end. peak_bytes: all tensors of this rank. `str()` is a table.
    """

    plan: Plan = field(repr=False)
    rank: int
    steps_us: tuple[float, ...]
    step_us: float
    compute_us: float
    exposed_us: Mapping[str, float]
    bubble_us: float
    peak_bytes: int
    timeline: Timeline = field(repr=False)

    @property
    def pp_rank(self) -> int:
        """The rank's coordinate along pp."""
        return self.plan.mesh.pp_rank(self.rank)

    def __str__(self) -> str:
        result, pp_rank = self.plan.prediction, self.pp_rank
        head = f"{self.plan.job.name}, {self.plan.schedule.family}, rank {self.rank} of {self.plan.world}"
        where = f" (pipeline rank {pp_rank})" if self.plan.ranks > 1 else ""
        step = line("step", result.step_us if result else None, self.step_us)
        rows = [step, *rank_lines(result, self.timeline, pp_rank)]
        return "\n".join([f"{head}{where}: predicted, rehearsed", *rows])


def rehearse(
    plan: Plan,
    rank: int,
    *,
    model: nn.Module | None = None,
    batch: Any = None,
    steps: int = 3,
    seed: int = 0,
) -> Rehearsal:
    """Walk one rank of `plan` on one device, with communication that takes the predicted time.

    rank: of the run, 0 to `plan.world - 1`. model: the model that was captured, whose values are used;
    without it parameters are random numbers of the right shapes. batch: as `Runner.step` takes it; made up
    without. steps: that count, after one to warm up.

    Raises UsageError when the plan has no such rank, when this machine lacks the plan's kind of device, or
    when model or batch do not fit; PlanError for a plan that is refused.
    """
    device = device_of(plan.job, "rehearse where there is one")
    if not 0 <= rank < plan.world:
        raise UsageError(f"there is no rank {rank}: the plan's ranks are 0 to {plan.world - 1}")
    if steps < 1:
        raise UsageError(f"{steps} steps cannot be rehearsed: give 1 or more")
    verify(plan)
    _refuse_endless(plan)
    on_cuda = device.type == "cuda"
    transport: End = CudaTransport(plan, rank, device) if on_cuda else EmulatedTransport(plan, rank)
    try:
        with explaining_failed_ops(rank):
            # 1. What is computed with.
            state, kept = _walker(plan, model, transport, device, seed)
            made_up = batch is None
            leaves = made_up_batch(plan.job, device, seed) if made_up else fit_batch(plan.job, batch, device)
            nbytes = bytes_throughout(plan.job, plan.schedule.stages_of(state.pp_rank))["optimizer"]
            if on_cuda and plan.job.updates:
                nbytes = 0  # the optimizer is there, and has its states from a first step on
                _step(state, transport, leaves, 0)
            kept = (*kept, torch.zeros(nbytes, dtype=torch.uint8, device=device))
            # 2. The steps.
            peak_bytes = _warm_up(state, transport, leaves, kept)
            measured = [_step(state, transport, leaves, peak_bytes) for _ in range(steps)]
    finally:
        transport.close()
    # 3. The one in the middle.
    middle = sorted(measured, key=lambda result: result.step_us)[(steps - 1) // 2]
    pp_rank = state.pp_rank
    return Rehearsal(
        plan,
        rank,
        tuple(timeline.step_us for timeline in measured),
        middle.step_us,
        middle.total_us(SpanKind.COMPUTE, pp_rank),
        {axis: by_rank[pp_rank] for axis, by_rank in middle.exposed_axis_us().items()},
        middle.total_us(SpanKind.BUBBLE, pp_rank),
        peak_bytes,
        middle,
    )


def _refuse_endless(plan: Plan) -> None:
    """The rank waits as long as others compute by its costs. Raises UsageError, PlanError."""
    step_us = simulate(plan).step_us
    if not step_us <= LONGEST_US:
        key, most_us = max(plan.costs.op_us.items(), key=lambda item: item[1], default=((0, ""), 0.0))
        raise UsageError(
            f"by the plan's costs a step takes {step_us / 1e6:,.0f} s, and a rehearsal waits as long: at "
            f"most {LONGEST_US / 1e6:,.0f} s can be rehearsed. Look at costs of ops (the longest: {key[1]!r} "
            f"of stage {key[0]}, {most_us / 1e6:,.0f} s), links and collectives, or plan again"
        )


def _walker(
    plan: Plan, model: nn.Module | None, transport: End, device: torch.device, seed: int
) -> tuple[RankState, Kept]:
    """Step 1: what walks the plan, and the tensors that it keeps."""
    if model is not None:
        optimizer = like(plan) if plan.job.updates else None
        runner = Runner(plan, model, transport=transport, seed=seed, optimizer=optimizer)
        resident = [buffer for _, buffer in runner.named_buffers()]
        return runner.state, (*runner.parameters(), *runner.tensors.compute.values(), *resident)
    pp_rank = plan.mesh.pp_rank(transport.rank)
    parameters = made_up_parameters(plan, pp_rank, device, seed)
    buffers = made_up_buffers(plan, pp_rank, device)
    transport.open(plan.communicators, device, plan.mesh)
    state = RankState(plan, transport, device, parameters, buffers, seed)
    state.optimize = made_up_optimize(plan, parameters)
    return state, (*parameters.values(), *buffers.values())


def _warm_up(state: RankState, transport: End, leaves: Mapping[str, torch.Tensor], kept: Kept) -> int:
    """A step that does not count; returns its peak memory in bytes."""
    if state.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.device)
        _step(state, transport, leaves, 0)
        return int(torch.cuda.max_memory_allocated(state.device))
    with MemoryMeter(kept) as meter:
        _step(state, transport, leaves, 0)
    return int(meter.peak_bytes)


def _step(state: RankState, transport: End, leaves: Mapping[str, torch.Tensor], peak_bytes: int) -> Timeline:
    transport.begin()
    state.step(leaves)
    state.grads = {}
    if isinstance(transport, CudaTransport):
        return transport.timeline(peak_bytes)
    step_us, live = transport.end()
    plan, pp_rank = state.plan, state.pp_rank
    spans = [*live.spans, *transport.idle]
    spans += compute_spans(plan, pp_rank, state.marks, transport.us_of, transport.idle)
    lane = [span for span in spans if span.rank == pp_rank and span.lane == COMPUTE_LANE]
    spans = without_closing_waits([*spans, *gap_spans(pp_rank, lane, step_us)])
    spans.sort(key=lambda s: (s.rank, s.lane != COMPUTE_LANE, s.lane, s.start_us, s.end_us))
    others = live.ranks
    peaks = tuple(
        others[rank].accounts.peak_bytes if rank in others else peak_bytes for rank in range(plan.ranks)
    )
    return Timeline("measured", plan.ranks, step_us, tuple(spans), peaks, members=plan.members)


def made_up_parameters(plan: Plan, pp_rank: int, device: torch.device, seed: int) -> dict[int, torch.Tensor]:
    """Of one pipeline rank: index in the job -> what a rank keeps of the parameter."""
    generator = torch.Generator().manual_seed(seed)
    stages = set(plan.schedule.stages_of(pp_rank))
    result: dict[int, torch.Tensor] = {}
    first: dict[str, int] = {}
    for k, parameter in enumerate(plan.job.parameters):
        if not stages & set(parameter.stages):
            continue
        like = first.setdefault(parameter.kept_as, k)
        spec = shard_spec(plan.job, parameter) if parameter.is_made else parameter.spec
        bucket = parameter.slot is not None
        same = like != k and (bucket or plan.job.parameters[like].spec == parameter.spec)
        result[k] = result[like] if same else _weights(spec, generator, device)
    return result


def _weights(spec: TensorSpec, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    built = torch.randn(spec.shape, generator=generator)
    built = built.div_(math.sqrt(spec.shape[-1])) if len(spec.shape) > 1 else built.mul_(0.02).add_(1.0)
    return built.to(device, dtype)


def made_up_buffers(plan: Plan, pp_rank: int, device: torch.device) -> dict[int, torch.Tensor]:
    """Of one pipeline rank: index in the job -> the buffer."""
    stages = set(plan.schedule.stages_of(pp_rank))
    result: dict[int, torch.Tensor] = {}
    for k, buffer in enumerate(plan.job.buffers):
        if stages & ({*buffer.stages} | {s for s, _, _ in buffer.updates}):
            dtype = getattr(torch, buffer.spec.dtype)
            fill = 1 if dtype.is_floating_point or dtype is torch.bool else 0
            result[k] = torch.full(buffer.spec.shape, fill, dtype=dtype, device=device)
    return result


def made_up_batch(job: Job, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Leaf -> the full batch's values, all microbatches and data-parallel copies along dim 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = rows_named(job)
    leaves: dict[str, torch.Tensor] = {}
    for name, spec in job.batch:
        shape = spec.shape if name in job.replicated else (spec.shape[0] * job.pieces, *spec.shape[1:])
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            built = torch.randn(shape, generator=generator).to(dtype)
        else:
            built = torch.randint(0, rows.get(name, 2), shape, generator=generator).to(dtype)
        leaves[name] = built.to(device)
    return leaves
