"""The race of experts: what hides their all-to-alls, on one network, over the same blocks.

A stack of blocks with experts (`moe_model`) over ep ranks, each with microbatches of its own; float32,
one thread a rank. A worker (`run_worker`, once on each host):

    1. captures the step uncut and with each number of chunks and slices, and measures the costs of each on
       this network, once; all plans of a cut are made from them;
    2. runs every system once: gradients and loss must be those of the plain model, or the race is void;
    3. lets the systems take turns (`raced`); the costs of the uncut step are measured again after the
       last, for the bound.

The MLP-only pipeline is `under_experts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import stretto
from benchmarks.kept import keep_run, prediction_of, with_costs
from benchmarks.moe_model import Stack, squared_error
from benchmarks.moe_result import (
    AUTO,
    AUTO_CHUNKS,
    AXIS,
    SERIAL,
    SYSTEMS,
    UNDER_EXPERTS,
    WHOLE,
    Cuts,
    Setup,
    System,
    make_result,
)
from benchmarks.race import compare, is_first, say_on_first
from benchmarks.raced import check_loss, one_step, own_parts, plain_step, plans_of, take_turns
from benchmarks.races import PROBE
from benchmarks.under_experts import under_experts
from benchmarks.work import Batch, work_of
from stretto.ir.costs import Costs
from stretto.ir.plan import Plan
from stretto.ir.program import Job
from stretto.measure.measured import measured_costs
from stretto.order.policies import register
from stretto.parallelize.expert_plan import experts_in
from stretto.planning.choose import choose_schedule
from stretto.planning.make_plan import make_plan


def run_worker(setup: Setup, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each system; or `PROBE`, where
    the work of a microbatch is all that is wanted. Raises RunError when gradients disagree."""
    say_on_first("capturing, and measuring this network")
    model, batch = setup.build()
    if kept == PROBE:
        job = setup.capture(model, batch)
        return [asdict(work_of(job, _measured(job), [0], AXIS))]
    # 1. All plans of a cut from the same costs.
    jobs = _captured(setup, model, batch)
    costs: dict[Cuts, Costs] = {}
    for cuts, job in jobs.items():
        costs[cuts] = _measured(job)
        say_on_first(f"{cuts.chunks} chunks, {cuts.slices} slices: costs are measured")
    plans = _planned(model, jobs, costs)
    runners: dict[str, stretto.Runner] = {}
    for name, plan in plans.items():
        runners[name] = stretto.Runner(plan, model, shares=runners.get(SERIAL))
        say_on_first(f"{name}: predicted {prediction_of(plan).step_us / 1e6:.3f} s")
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners)
    # 3. In turn.
    times, timelines = take_turns(runners, {}, batch, setup.rounds)
    serial = plans[SERIAL]
    again = with_costs(serial, _measured(jobs[WHOLE]))
    if not is_first():
        return None
    work = work_of(jobs[WHOLE], costs[WHOLE], [0], AXIS)
    result = make_result(setup, plans_of(runners), times, timelines, work, prediction_of(again))
    result["setup"]["worst_error_vs_plain"] = error
    for name, plan in plans.items() if kept else ():
        keep_run(Path(kept) / name.replace(",", "").replace(" ", "-"), plan, plan, timelines[name])
    return result


def _captured(setup: Setup, model: Stack, batch: Batch) -> dict[Cuts, Job]:
    """The step in every way in which a system cuts it. Those in chunks are what "auto" captures."""
    auto = setup.capture(model, batch, ampipe_degree="auto")
    found = {WHOLE: replace(auto, forms=())} | {Cuts(job.chunks): job for job in auto.forms}
    for cuts in dict.fromkeys(system.cuts for system in SYSTEMS.values()):
        if cuts not in found:
            how = {"ampipe_degree": cuts.chunks, "pipe_experts_multi_data": cuts.slices}
            found[cuts] = setup.capture(model, batch, **how)
    return found


def _measured(job: Job) -> Costs:
    return measured_costs(job, choose_schedule(job))


def _planned(model: Stack, jobs: Mapping[Cuts, Job], costs: Mapping[Cuts, Costs]) -> dict[str, Plan]:
    """By name, `SERIAL` first."""

    def plan(system: System) -> Plan:
        job = jobs[system.cuts]
        if system.order == UNDER_EXPERTS:
            register(UNDER_EXPERTS, under_experts(job, experts_in(model)))
        return make_plan(job, costs[system.cuts], overlap=system.overlap, order=system.order)

    found = {name: plan(system) for name, system in SYSTEMS.items()}
    windows = [found["windows"], *(plan(System(Cuts(chunks), "window")) for chunks in AUTO_CHUNKS)]
    # As planning chooses, from the costs that all have.
    found[AUTO] = min(windows, key=lambda one: prediction_of(one).step_us)
    return found


def _check_equal(setup: Setup, model: Stack, batch: Batch, runners: Mapping[str, stretto.Runner]) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    loss, whole = plain_step(model, batch, squared_error, setup.microbatches * setup.ep)
    plain = own_parts(runners[SERIAL], whole)
    worst = 0.0
    for name, runner in runners.items():
        found, grads = one_step(runner, batch)
        worst = max(worst, compare(name, grads, plain, "the plain model"))
        check_loss(name, found, loss)
    return worst
