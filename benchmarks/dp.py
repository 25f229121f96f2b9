"""The race of data parallelism: what of a model each rank keeps, on one network, over the same GPT.

A GPT whose batch dp ranks share, one on each host; float32, one thread a rank. A worker (`run_worker`, once
on each host):

    1. captures the step with each level of sharding, and measures the costs of each on this network, once;
    2. runs every system once: gradients and loss must be those of the plain model, and shards that are
       waited for at once must give bitwise what those that are not give, or the race is void;
    3. lets the systems take turns (`benchmarks.racing`); the costs are measured again after the last, for the
       bounds.

PyTorch's own is `benchmarks.torch_dp`. A step is forward and backward of all microbatches: it ends when
gradients are summed, and begins with the gathers of what an optimizer would have changed. What is hidden is
as each plan reports it itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

import stretto
from benchmarks.labs import PROBE
from benchmarks.racing import (
    StepResult,
    Times,
    check_bitwise,
    check_loss,
    compare,
    drop_gradients,
    exposed_s,
    fresh,
    is_first,
    keep_runs,
    one_step,
    own_parts,
    plain_step,
    plans_of,
    prediction_of,
    race_json,
    say_on_first,
    start_runners,
    take_turns,
    with_costs,
)
from benchmarks.torch_dp import TORCH, TorchCopies, TorchShards
from benchmarks.work import Batch, GPTShape, RankWork, work_of
from stretto.ir.axes import DP
from stretto.ir.collectives import ALL_GATHER, ALL_REDUCE
from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import Timeline
from stretto.ir.transfers import axis_time
from stretto.measure.measured import measure_forms
from stretto.models.gpt import GPT, next_token_loss
from stretto.planning.make_plan import listed, make_plan
from stretto.planning.schedules import choose_schedule

AXIS = DP.name

BLOCKING, SHARDS, STATES, COPIES = "zero 3 blocking", "zero 3", "zero 1", "zero 0"
FSDP, FSDP_KEPT, DDP = TORCH


@dataclass(frozen=True, slots=True)
class ShardSystem:
    """What a rank keeps, as the setting `zero`, and what may hide its gathers and scatters."""

    zero: int
    overlap: OverlapMode = "window"


SYSTEMS: Mapping[str, ShardSystem] = {
    BLOCKING: ShardSystem(3, "off"),
    SHARDS: ShardSystem(3),
    STATES: ShardSystem(1),
    COPIES: ShardSystem(0),
}

LEVELS = tuple(sorted({system.zero for system in SYSTEMS.values()}))
"""What may race."""

PASSES = 3
"""How often parameters go around in a step of the rate: gathered for the forward and for the backward, and
scattered as gradients. An all-reduce is two of them."""


@dataclass(frozen=True, slots=True)
class DataRace(GPTShape):
    """One race. levels: values of `zero` that race. memory_bytes: the most that a rank may use, up to which
    what plans gather may stay."""

    dp: int = 2
    hidden: int = 512
    heads: int = 8
    layers: int = 4
    vocab: int = 2048
    sequence: int = 256
    microbatch: int = 4
    microbatches: int = 1
    levels: Sequence[int] = LEVELS
    rounds: int = 3
    memory_bytes: int = 2**31

    @property
    def world(self) -> int:
        return self.dp

    def __str__(self) -> str:
        return f"dp={self.dp}, {self.rate}"

    @property
    def systems(self) -> dict[str, ShardSystem]:
        """Those of `SYSTEMS` that race."""
        return {name: system for name, system in SYSTEMS.items() if system.zero in self.levels}

    @property
    def rows(self) -> int:
        return self.microbatch * self.microbatches * self.dp

    def capture(self, model: GPT, batch: Batch, zero: int = 0) -> Job:
        """The step as a job."""
        parallel = stretto.Parallel(dp=self.dp, zero=zero, microbatches=self.microbatches)
        return stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)


def step_work(job: Job, costs: Costs) -> RankWork:
    """What a step asks of a rank: compute of all microbatches, and `PASSES` of all parameters.

    job: with full copies, whose costs have the curve of all-reduces. The time is by the largest parameter's,
    as small ones travel together.
    """
    compute_us = job.microbatches * work_of(job, costs, range(len(job.stages)), AXIS).compute_us
    sizes = {parameter.tied_to: parameter.grad_nbytes for parameter in job.parameters}
    largest, total = max(sizes.values()), sum(sizes.values())
    rounds = PASSES / ALL_REDUCE.turns * total / largest
    passes_us = rounds * axis_time(costs, AXIS, ALL_REDUCE.cost, largest).us
    return RankWork(compute_us, passes_us, PASSES * ALL_GATHER.moved(job.size(AXIS)) * total, 0.0)


def make_result(
    setup: DataRace,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    work: RankWork,
    known: Mapping[str, Prediction],
    **more: Any,
) -> dict[str, Any]:
    """The JSON of the race. work: `step_work`. known: what is predicted of each plan by costs that are
    measured again after the race, from which its bound is."""
    bases_s = {"fsdp2": times[FSDP].median_s, "fsdp2_kept": times[FSDP_KEPT].median_s}
    bases_s["ddp"] = times[DDP].median_s
    own = {}
    for name, plan in plans.items():
        planned_s, bound_s = prediction_of(plan).step_us / 1e6, known[name].bound_us / 1e6
        own[name] = {
            "overlap": plan.overlap,
            "overlap_why": plan.overlap_why,
            "planned_s": planned_s,
            "measured_over_planned": times[name].median_s / planned_s,
            "own_bound_s": bound_s,
            "ratio_to_own_bound": times[name].median_s / bound_s,
            "exposed_s": max(exposed_s(timelines[name], lambda span: span.axis == AXIS)),
            "hidden": statistics.median(line.hidden.get(AXIS, 1.0) for line in timelines[name]),
            "peak_bytes": max(timelines[name][-1].peak_bytes),
        }
    first = next(name for name in (SHARDS, STATES, COPIES) if name in plans)
    return race_json(
        setup,
        times,
        bases_s,
        known[first],
        own,
        bound_of=first,
        step_work=asdict(work),
        communication_over_compute=work.ratio,
        costs=plans[first].costs.source,
        **more,
    )


WORKER = "dp"
"""The module of this room that every rank runs."""

VERSION = 1
"""Of the JSON: it goes up when a key changes its meaning or is gone."""

SHAPES = {2: DataRace(dp=2), 4: DataRace(dp=4, microbatch=2)}
"""Hosts, a rank on each -> the race. Four have half a core each and half as many tokens: a race of either
takes as long."""


def races(
    rates: Sequence[str], hosts: Sequence[int], levels: Sequence[int], *, rounds: int
) -> list[DataRace]:
    """The races of all combinations, hosts outermost."""
    how: dict[str, Any] = {"levels": levels, "rounds": rounds}
    return [replace(SHAPES[ranks], rate=rate, **how) for ranks in hosts for rate in rates]


def run_worker(setup: DataRace, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each system; or `PROBE`, where
    the work of a step is all that is wanted. Raises RunError when gradients disagree."""
    say_on_first("capturing, and measuring this network")
    model, batch = setup.build()
    jobs = {0: setup.capture(model, batch)}
    if kept == PROBE:
        return [asdict(step_work(jobs[0], *_measured(*jobs.values())))]
    # 1. All plans of a level from the same costs.
    systems = setup.systems
    jobs |= {zero: setup.capture(model, batch, zero) for zero in setup.levels if zero}
    costs = dict(zip(jobs, _measured(*jobs.values()), strict=True))
    runners: dict[str, stretto.Runner] = {}
    for zero in jobs:
        plans = {}
        for name, system in systems.items():
            if system.zero == zero:
                say_on_first(f"planning {name}")
                plans[name] = make_plan(
                    jobs[zero], costs[zero], overlap=system.overlap, max_bytes=setup.memory_bytes
                )
        runners |= start_runners(plans, model)  # a call a level: ranks keep other parts at another
    theirs = {name: make(model, setup.microbatches) for name, make in TORCH.items()}
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners, theirs)
    # 3. In turn.
    torchs = {name: fresh(one.parameters(), partial(one.step, batch)) for name, one in theirs.items()}
    times, timelines = take_turns(runners, torchs, batch, setup.rounds)
    plans = plans_of(runners)
    again = dict(zip(jobs, _measured(*jobs.values()), strict=True))
    if not is_first():
        return None
    keep_runs(kept, runners, timelines)
    known: dict[str, Prediction] = {}
    for name, plan in plans.items():
        zero = systems[name].zero
        now = listed(jobs[zero], again[zero]).costs_of(plan.job)  # of what planning made of it
        known[name] = prediction_of(with_costs(plan, now))
    work = step_work(jobs[0], costs[0])
    return make_result(setup, plans, times, timelines, work, known, worst_error_vs_plain=error)


def _measured(*jobs: Job) -> list[Costs]:
    return measure_forms(jobs, [choose_schedule(job) for job in jobs], say=say_on_first)


def _check_equal(
    setup: DataRace,
    model: GPT,
    batch: Batch,
    runners: Mapping[str, stretto.Runner],
    theirs: Mapping[str, TorchShards | TorchCopies],
) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    loss, full = plain_step(model, batch, next_token_loss, setup.microbatches * setup.dp)
    worst = 0.0
    steps: dict[str, StepResult] = {}
    for name, runner in runners.items():
        steps[name] = one_step(runner, batch)
        found, grads = steps[name]
        check_loss(name, found, loss)
        worst = max(worst, compare(name, grads, own_parts(runner, full), "the plain model"))
    for name, one in theirs.items():
        dist.barrier()
        check_loss(name, float(one.step(batch)), loss)
        worst = max(worst, compare(name, dict(one.grads()), full, "the plain model"))
        drop_gradients(one.parameters())
    if BLOCKING in steps:
        check_bitwise(SHARDS, steps[SHARDS], BLOCKING, steps[BLOCKING])
    return worst


SETUP = DataRace
"""What a worker of this module takes."""
