"""The race of long sequences: how the keys and values of other ranks come, on one network, over the same GPT.

A GPT whose sequence cp ranks share, one on each host; float32, one thread a rank. A worker (`run_worker`,
once on each host):

    1. captures the step with each kind of context parallelism, and measures the costs of each on this
       network, once; all plans of a kind are made from them;
    2. runs every system once: gradients and loss must be those of the plain model, and a ring that waits at
       once must be bitwise the one that does not, or the race is void;
    3. lets the systems take turns (`benchmarks.racing`); the costs of the ring are measured again after the
       last, for the bound.

PyTorch's own is `benchmarks.torch_context`. What is hidden is of the ring's messages: those that carry keys
and values, and those that bring their gradients home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

import stretto
from benchmarks.labs import PROBE
from benchmarks.racing import (
    Times,
    check_bitwise,
    check_loss,
    compare,
    drop_gradients,
    exposed_by_s,
    exposed_s,
    fresh,
    hidden,
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
from benchmarks.torch_context import ROTATIONS, TorchContext
from benchmarks.work import Batch, GPTShape, RankWork, work_of
from stretto.ir.axes import CP
from stretto.ir.collectives import PERMUTE_NEXT
from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import Timeline
from stretto.measure.measured import measure_forms
from stretto.models.gpt import GPT, next_token_loss
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule

AXIS = CP.name

RING, BLOCKING, GATHERED, ULYSSES = "ring", "blocking", "gathered", "ulysses"
TORCH_RING, *_ = ROTATIONS


@dataclass(frozen=True, slots=True)
class ContextSystem:
    """How keys and values come, as the setting `cp_kind`, and what may hide that."""

    kind: str
    overlap: OverlapMode = "window"


SYSTEMS: Mapping[str, ContextSystem] = {
    BLOCKING: ContextSystem(RING, "off"),
    RING: ContextSystem(RING),
    GATHERED: ContextSystem(GATHERED),
    ULYSSES: ContextSystem(ULYSSES),
}


@dataclass(frozen=True, slots=True)
class ContextRace(GPTShape):
    """One race."""

    cp: int = 2
    hidden: int = 256
    heads: int = 4
    layers: int = 2
    vocab: int = 1024
    sequence: int = 2048
    microbatch: int = 1
    microbatches: int = 4
    rounds: int = 3

    @property
    def world(self) -> int:
        return self.cp

    def __str__(self) -> str:
        return f"cp={self.cp}, {self.rate}"

    def capture(self, model: GPT, batch: Batch, kind: str = RING) -> Job:
        """The step as a job."""
        parallel = stretto.Parallel(cp=self.cp, cp_kind=kind, microbatches=self.microbatches)
        return stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)


def make_result(
    setup: ContextRace,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    work: RankWork,
    known: Prediction,
    **more: Any,
) -> dict[str, Any]:
    """The JSON of the race.

    work: of a microbatch of the ring. known: what is predicted of the ring by costs that are measured again
    after the race, from which the bound is.
    """
    bases_s = {"blocking": times[BLOCKING].median_s, "torch_ring": times[TORCH_RING].median_s}
    messages = {name: exposed_by_s(plan, timelines[name], PERMUTE_NEXT) for name, plan in plans.items()}
    own = {}
    for name, plan in plans.items():
        planned_s = prediction_of(plan).step_us / 1e6
        own[name] = {
            "overlap": plan.overlap,
            "overlap_why": plan.overlap_why,
            "planned_s": planned_s,
            "measured_over_planned": times[name].median_s / planned_s,
            "exposed_s": max(exposed_s(timelines[name], lambda span: span.axis == AXIS)),
            "peak_bytes": max(timelines[name][-1].peak_bytes),
        }
        if SYSTEMS[name].kind == RING:
            (share,) = hidden([messages[name]], [messages[BLOCKING]])
            own[name] |= {"exposed_messages_s": messages[name], "hidden": share}
    return race_json(
        setup,
        times,
        bases_s,
        known,
        own,
        microbatch_work=asdict(work),
        communication_over_compute=work.ratio,
        costs=plans[RING].costs.source,
        **more,
    )


WORKER = "context"
"""The module of this room that every rank runs."""

VERSION = 1
"""Of the JSON: it goes up when a key changes its meaning or is gone."""

SHAPES = {2: ContextRace(cp=2), 4: ContextRace(cp=4)}
"""Hosts, a rank on each -> the race. Four have half a core each and half as many tokens: a race of either
takes as long."""


def races(rates: Sequence[str], hosts: Sequence[int], *, rounds: int) -> list[ContextRace]:
    """The races of all combinations, hosts outermost."""
    return [replace(SHAPES[ranks], rate=rate, rounds=rounds) for ranks in hosts for rate in rates]


def run_worker(setup: ContextRace, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each system; or `PROBE`, where
    the work of a microbatch is all that is wanted. Raises RunError when gradients disagree."""
    say_on_first("capturing, and measuring this network")
    model, batch = setup.build()
    if kept == PROBE:
        job = setup.capture(model, batch)
        return [asdict(work_of(job, *_measured(job), [0], AXIS))]
    # 1. All plans of a kind from the same costs.
    kinds = list(dict.fromkeys(system.kind for system in SYSTEMS.values()))
    jobs = {kind: setup.capture(model, batch, kind) for kind in kinds}
    costs = dict(zip(kinds, _measured(*jobs.values()), strict=True))
    plans: dict[str, Plan] = {}
    for name, system in SYSTEMS.items():
        say_on_first(f"planning {name}")
        plans[name] = make_plan(jobs[system.kind], costs[system.kind], overlap=system.overlap)
    runners = start_runners(plans, model)
    theirs = {name: TorchContext(model, setup.microbatches, rotation) for name, rotation in ROTATIONS.items()}
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners, theirs)
    # 3. In turn.
    torchs = {name: fresh(one.parameters(), partial(one.step, batch)) for name, one in theirs.items()}
    times, timelines = take_turns(runners, torchs, batch, setup.rounds)
    ring = plans[RING]
    again = with_costs(ring, *_measured(ring.job))
    if not is_first():
        return None
    keep_runs(kept, runners, timelines)
    work, bound = work_of(ring.job, ring.costs, [0], AXIS), prediction_of(again)
    more = {"worst_error_vs_plain": error}
    return make_result(setup, plans_of(runners), times, timelines, work, bound, **more)


def _measured(*jobs: Job) -> list[Costs]:
    return measure_forms(jobs, [choose_schedule(job) for job in jobs], say=say_on_first)


def _check_equal(
    setup: ContextRace,
    model: GPT,
    batch: Batch,
    runners: Mapping[str, stretto.Runner],
    theirs: Mapping[str, TorchContext],
) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    loss, full = plain_step(model, batch, next_token_loss, setup.microbatches)
    steps = {name: one_step(runner, batch) for name, runner in runners.items()}
    for name, one in theirs.items():
        dist.barrier()
        found = float(one.step(batch))
        steps[name] = found, {key: grad.clone() for key, grad in one.grads()}
        drop_gradients(one.parameters())
    plain = own_parts(runners[RING], full)
    for name, (found, _) in steps.items():
        check_loss(name, found, loss)
    check_bitwise(RING, steps[RING], BLOCKING, steps[BLOCKING])
    return max(compare(name, grads, plain, "the plain model") for name, (_, grads) in steps.items())


SETUP = ContextRace
"""What a worker of this module takes."""
