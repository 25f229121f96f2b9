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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import stretto
from benchmarks.labs import PROBE
from benchmarks.moe_model import Routing, Stack, squared_error, under_experts
from benchmarks.racing import (
    Times,
    check_steps,
    exposed_by_s,
    hidden,
    is_first,
    keep_runs,
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
from benchmarks.work import Batch, RankWork, work_of
from stretto.ir.axes import EP
from stretto.ir.collectives import ALL_TO_ALL
from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import Timeline
from stretto.measure.measured import measured_costs
from stretto.models.moe import MoEConfig
from stretto.order.policies import DEFAULT, register
from stretto.parallelize.experts import experts_in
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule

AXIS = EP.name

SERIAL, MLP_ONLY, AUTO = "serial", "MLP-only", "auto"

UNDER_EXPERTS = "under experts"
"""The policy of `benchmarks.moe_model`."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """chunks: of the sequence (AMPipe). slices: of what experts get (pipe-experts)."""

    chunks: int = 1
    slices: int = 1


FULL = Cuts()


@dataclass(frozen=True, slots=True)
class MoeSystem:
    """How it cuts, what may hide communication, and the policy that orders ops."""

    cuts: Cuts
    overlap: OverlapMode
    order: str = DEFAULT


SYSTEMS: Mapping[str, MoeSystem] = {
    SERIAL: MoeSystem(FULL, "off"),
    f"{MLP_ONLY} 2": MoeSystem(Cuts(slices=2), "local", UNDER_EXPERTS),
    f"{MLP_ONLY} 4": MoeSystem(Cuts(slices=4), "local", UNDER_EXPERTS),
    "pipe-experts 2": MoeSystem(Cuts(slices=2), "local"),
    "AMPipe 2": MoeSystem(Cuts(chunks=2), "local"),
    "AMPipe 4": MoeSystem(Cuts(chunks=4), "local"),
    "AMPipe 2, pipe-experts 2": MoeSystem(Cuts(chunks=2, slices=2), "local"),
    "windows": MoeSystem(FULL, "window"),
}
"""All but `AUTO`: of windows over `AUTO_CHUNKS` and over full sequences the fastest by prediction."""

AUTO_CHUNKS = (2, 4)
"""Besides full sequences: what `ampipe_degree = "auto"` tries."""


@dataclass(frozen=True, slots=True)
class MoeRace:
    """One race. Shapes are those of the full model and of one microbatch of a rank. rate: as the lab takes
    it. expert_ratio: width of an expert over `hidden`."""

    rate: str = "unlimited"
    ep: int = 2
    routing: Routing = "balanced"
    hidden: int = 512
    heads: int = 8
    layers: int = 2
    sequence: int = 1024
    experts: int = 8
    top_k: int = 2
    expert_ratio: float = 2.0
    microbatch: int = 1
    microbatches: int = 4
    ep_buffer: float = 1.5
    rounds: int = 3
    threads_per_rank: int = 1
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return self.ep

    def __str__(self) -> str:
        return f"ep={self.ep}, {self.routing}, {self.rate}"

    def build(self) -> tuple[Stack, Batch]:
        """The model and the full batch, equal in all processes."""
        torch.manual_seed(0)
        config = MoEConfig(
            vocab_size=1,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            context=self.sequence,
            positions="learned",
            experts=self.experts,
            top_k=self.top_k,
            expert_ratio=self.expert_ratio,
            capacity_factor=1.0 if self.routing == "balanced" else None,
        )
        size = (self.microbatch * self.microbatches * self.ep, self.sequence, self.hidden)
        return Stack(config, self.routing), {name: torch.randn(size) for name in ("x", "target")}

    def capture(self, model: Stack, batch: Batch, **how: Any) -> Job:
        """The step as a job. how: more of `stretto.Parallel`."""
        if self.routing == "router":
            how["ep_buffer"] = self.ep_buffer
        parallel = stretto.Parallel(dp=self.ep, ep=self.ep, microbatches=self.microbatches, **how)
        return stretto.capture(model, batch, loss=squared_error, parallel=parallel)


def make_result(
    setup: MoeRace,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    work: RankWork,
    known: Prediction,
    **more: Any,
) -> dict[str, Any]:
    """The JSON of the race.

    work: of a microbatch. known: what is predicted of `SERIAL` by costs that are measured again after the
    race, from which the bound is: of the step that is not cut, as cuts add work.
    """
    fastest_s = min(took.median_s for name, took in times.items() if name.startswith(MLP_ONLY))
    bases_s = {"serial": times[SERIAL].median_s, "mlp_only": fastest_s}
    exposed = {name: exposed_by_s(plans[name], lines, ALL_TO_ALL) for name, lines in timelines.items()}
    own = {}
    for name, plan in plans.items():
        planned_s = prediction_of(plan).step_us / 1e6
        own[name] = {
            "bound_s": known.bound_us / 1e6,
            "overlap": plan.overlap,
            "overlap_why": plan.overlap_why,
            "chunks": plan.job.chunks,
            "planned_s": planned_s,
            "measured_over_planned": times[name].median_s / planned_s,
            "exposed_s": exposed[name],
            "hidden": hidden([exposed[name]], [exposed[SERIAL]])[0],
            "peak_bytes": max(timelines[name][-1].peak_bytes),
        }
    return race_json(
        setup,
        times,
        bases_s,
        known,
        own,
        microbatch_work=asdict(work),
        communication_over_compute=work.ratio,
        costs=plans[SERIAL].costs.source,
        **more,
    )


WORKER = "moe"
"""The module of this room that every rank runs."""

VERSION = 2
"""Of the JSON: it goes up when a key changes its meaning or is gone."""

SHAPES = {2: MoeRace(ep=2), 4: MoeRace(ep=4, sequence=512)}
"""Hosts, a rank on each -> the race. Four have half a core each, so their sequences are half as long: a race
of either takes as long."""


def races(
    rates: Sequence[str], hosts: Sequence[int], routings: Sequence[Routing], *, rounds: int
) -> list[MoeRace]:
    """The races of all combinations, hosts outermost."""
    return [
        replace(SHAPES[ranks], rate=rate, routing=routing, rounds=rounds)
        for ranks in hosts
        for routing in routings
        for rate in rates
    ]


def run_worker(setup: MoeRace, kept: str = "") -> Any:
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
    runners = start_runners(plans, model)
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners)
    # 3. In turn.
    times, timelines = take_turns(runners, {}, batch, setup.rounds)
    serial = plans[SERIAL]
    again = with_costs(serial, _measured(jobs[FULL]))
    if not is_first():
        return None
    work = work_of(jobs[FULL], costs[FULL], [0], AXIS)
    keep_runs(kept, runners, timelines)
    bound, error_of = prediction_of(again), {"worst_error_vs_plain": error}
    return make_result(setup, plans_of(runners), times, timelines, work, bound, **error_of)


def _captured(setup: MoeRace, model: Stack, batch: Batch) -> dict[Cuts, Job]:
    """The step in every way in which a system cuts it. Those in chunks are what "auto" captures."""
    auto = setup.capture(model, batch, ampipe_degree="auto")
    result = {FULL: replace(auto, forms=())} | {Cuts(job.chunks): job for job in auto.forms}
    for cuts in dict.fromkeys(system.cuts for system in SYSTEMS.values()):
        if cuts not in result:
            how = {"ampipe_degree": cuts.chunks, "pipe_experts_multi_data": cuts.slices}
            result[cuts] = setup.capture(model, batch, **how)
    return result


def _measured(job: Job) -> Costs:
    return measured_costs(job, choose_schedule(job))


def _planned(model: Stack, jobs: Mapping[Cuts, Job], costs: Mapping[Cuts, Costs]) -> dict[str, Plan]:
    """By name, `SERIAL` first."""

    def plan(system: MoeSystem) -> Plan:
        job = jobs[system.cuts]
        if system.order == UNDER_EXPERTS:
            register(UNDER_EXPERTS, under_experts(job, experts_in(model)))
        return make_plan(job, costs[system.cuts], overlap=system.overlap, order=system.order)

    result = {name: plan(system) for name, system in SYSTEMS.items()}
    windows = [result["windows"], *(plan(MoeSystem(Cuts(chunks), "window")) for chunks in AUTO_CHUNKS)]
    # As planning chooses, from the costs that all have.
    result[AUTO] = min(windows, key=lambda one: prediction_of(one).step_us)
    return result


def _check_equal(setup: MoeRace, model: Stack, batch: Batch, runners: Mapping[str, stretto.Runner]) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    loss, full = plain_step(model, batch, squared_error, setup.microbatches * setup.ep)
    return check_steps(runners, batch, own_parts(runners[SERIAL], full), loss)


SETUP = MoeRace
"""What a worker of this module takes."""
