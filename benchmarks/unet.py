"""The race of a U-Net whose skips cross stages: what waits for messages, what hides them, and PyTorch.

`UNet2DConditionModel` of `diffusers` as it comes, over two stages that are cut in its decoder
(`torch_unet.CUT`), so that five skips and the hidden state cross for each microbatch; float32, one
thread a rank. A worker (`run_worker`, once on each host):

    1. captures the step and measures its costs on this network, once; all plans are made from them;
    2. runs every system once: gradients and loss must be those of the plain model, or the race is void;
    3. lets the systems take turns (`raced`); costs are measured again after the last, for the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto
from benchmarks.labs import PROBE
from benchmarks.racing import (
    RaceStep,
    Times,
    check_loss,
    check_steps,
    compare,
    drop_gradients,
    exposed_s,
    fresh,
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
from benchmarks.torch_unet import CUT, torch_steps
from benchmarks.work import Batch, RankWork, work_of
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.costs import Costs, Prediction
from stretto.ir.plan import Plan
from stretto.ir.program import Job, OverlapMode
from stretto.ir.timeline import Timeline
from stretto.ir.transfers import time_of
from stretto.measure.measured import measured_costs
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule

BLOCKING, TORCH = "blocking 1f1b", "torch 1f1b"

WORKER = "unet"
"""This module, which every rank runs."""

VERSION = 2
"""Of the JSON: it goes up when a key changes its meaning or is gone."""


@dataclass(frozen=True, slots=True)
class UNetSystem:
    """A schedule's name, and what may hide its messages: with "off" each is waited for at once."""

    schedule: str
    overlap: OverlapMode = "window"


SYSTEMS: Mapping[str, UNetSystem] = {
    BLOCKING: UNetSystem("1f1b", "off"),
    "1f1b": UNetSystem("1f1b"),
    "eager-1f1b": UNetSystem("eager-1f1b"),
    "eager-1f1b-split": UNetSystem("eager-1f1b-split"),
    "zb-h1": UNetSystem("zb-h1"),
    "zb-h2": UNetSystem("zb-h2"),
    "auto": UNetSystem("auto"),
}
"""In the order in which they are made, the one that waits for all first."""

SAME_GRADIENTS = 1e-4
"""Relative error up to which float32 gradients of a U-Net are the same. Assumed: gradients of biases before a
norm are small sums of large numbers; what was found is in the JSON (`worst_error_vs_plain`)."""


@dataclass(frozen=True, slots=True)
class UNetRace:
    """One race. Shapes are those of the full model and of one microbatch. rate: as the lab takes it.
    channels: of the first of four levels, which have c, 2c, 4c and 8c: so both halves take about as long."""

    rate: str = "unlimited"
    channels: int = 48
    image: int = 16
    states: int = 16
    microbatch: int = 8
    microbatches: int = 8
    rounds: int = 5
    threads_per_rank: int = 1
    dtype: str = "float32"

    @property
    def world(self) -> int:
        return 2

    def __str__(self) -> str:
        return f"U-Net of {self.channels} channels, {self.rate}"

    def build(self) -> tuple[nn.Module, Batch]:
        """The model and the full batch, equal in all processes. Raises UsageError without `diffusers`."""
        check_installed()
        from diffusers import UNet2DConditionModel

        torch.manual_seed(0)
        model = UNet2DConditionModel(
            sample_size=self.image,
            layers_per_block=1,
            block_out_channels=tuple(self.channels << level for level in range(4)),
            cross_attention_dim=4 * self.channels,
            attention_head_dim=8,  # how many heads: diffusers calls it so
            norm_num_groups=8,
        )
        assert isinstance(model, nn.Module)
        rows, image = self.microbatch * self.microbatches, (4, self.image, self.image)
        return model, {
            "image": torch.randn(rows, *image),
            "noise": torch.randn(rows, *image),
            "time": torch.randint(0, 1000, (rows,)),
            "states": torch.randn(rows, self.states, 4 * self.channels),
        }

    def capture(self, model: nn.Module, batch: Batch) -> Job:
        parallel = stretto.Parallel(pp=2, microbatches=self.microbatches, schedule="1f1b", split=[CUT])
        return stretto.capture(model, batch, loss=squared_error, parallel=parallel)


def check_installed() -> None:
    """Raises UsageError without `diffusers`."""
    if find_spec("diffusers") is None:
        raise UsageError("the U-Net is that of diffusers, which is missing: pip install 'stretto[diffusion]'")


def squared_error(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean squared error of the noise that the model says was added."""
    said = model(batch["image"], batch["time"], encoder_hidden_states=batch["states"]).sample
    return nn.functional.mse_loss(said, batch["noise"])


def run_worker(setup: UNetRace, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each system; or `PROBE`, where
    what a forward of each stage asks is all that is wanted. Raises RunError when gradients disagree."""
    say_on_first("capturing, and measuring this network")
    model, batch = setup.build()
    job = setup.capture(model, batch)
    costs = measured_costs(job, choose_schedule(job))
    if kept == PROBE:
        return [asdict(forward_of(job, costs, stage)) for stage in range(setup.world)]
    # 1. All plans from the same costs.
    plans = {
        name: make_plan(job, costs, schedule=system.schedule, overlap=system.overlap)
        for name, system in SYSTEMS.items()
    }
    runners = start_runners(plans, model)
    parameters = list(model.parameters())
    steps = torch_steps(model, batch, setup.microbatches, dist.get_rank())
    theirs = {name: fresh(parameters, step) for name, step in steps.items()}
    # 2. The same numbers.
    error = _check_equal(setup, model, batch, runners, theirs)
    # 3. In turn.
    times, timelines = take_turns(runners, theirs, batch, setup.rounds)
    base = runners[BLOCKING].plan
    again = with_costs(base, measured_costs(base.job, base.schedule))
    if not is_first():
        return None
    keep_runs(kept, runners, timelines)
    forward = [asdict(forward_of(job, costs, stage)) for stage in range(setup.world)]
    more = {"worst_error_vs_plain": error, "forward": forward}
    return make_result(setup, plans_of(runners), times, timelines, prediction_of(again), **more)


def forward_of(job: Job, costs: Costs, stage: int) -> RankWork:
    """What a forward of one microbatch takes, with what its stage sends for one: so the balanced rate
    (`races`) is the one at which a microbatch's messages take as long as the longer forward."""
    forward_us = sum(time_of(costs, stage, op) for op in job.stages[stage].ops[Phase.F])
    return replace(work_of(job, costs, [stage]), compute_us=forward_us)


def _check_equal(
    setup: UNetRace,
    model: nn.Module,
    batch: Batch,
    runners: Mapping[str, stretto.Runner],
    theirs: Mapping[str, RaceStep],
) -> float:
    """Step 2. Returns the worst relative error of a gradient against the plain model's."""
    loss, full = plain_step(model, batch, squared_error, setup.microbatches)
    base = runners[BLOCKING]
    plain = own_parts(base, full)
    worst = check_steps(runners, batch, plain, loss, SAME_GRADIENTS)
    for name, step in theirs.items():
        dist.barrier()
        told = step()
        if told is not None:
            check_loss(name, float(told), loss)
        grads = {key: p.grad.clone() for key, p in base.named_parameters() if p.grad is not None}
        worst = max(worst, compare(name, grads, plain, "the plain model", SAME_GRADIENTS))
    drop_gradients(model.parameters())
    return worst


def make_result(
    setup: UNetRace,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    known: Prediction,
    **more: Any,
) -> dict[str, Any]:
    """The JSON of the race. known: what is predicted of `BLOCKING` by costs that are measured again after the
    race, from which the bound is."""
    bases_s = {name.replace(" ", "_"): times[name].median_s for name in (BLOCKING, TORCH)}
    own = {}
    for name, plan in plans.items():
        planned_s = prediction_of(plan).step_us / 1e6
        own[name] = {
            "schedule": plan.schedule.family,
            "overlap": plan.overlap,
            "planned_s": planned_s,
            "measured_over_planned": times[name].median_s / planned_s,
            "exposed_s": exposed_s(timelines[name]),
            "peak_bytes": list(timelines[name][-1].peak_bytes),
        }
    return race_json(setup, times, bases_s, known, own, costs=plans[BLOCKING].costs.source, **more)


SETUP = UNetRace
"""What a worker of this module takes."""
