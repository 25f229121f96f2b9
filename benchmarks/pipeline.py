"""The pipeline race: PyTorch's own pipelining and families of ours over the same slow links.

A stack of transformer blocks, mean squared error, float32, one thread a rank. A worker (`run_worker`, once on
each host):

    1. captures the step once for each number of stages a rank, and measures its costs on this network; the
       plans of families are made from them;
    2. runs every system once: loss and gradients must be those of the plain model, or the race is void;
    3. lets the systems take turns (`benchmarks.racing`), and keeps the timeline of each of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from benchmarks.racing import (
    RaceStep,
    Times,
    check_loss,
    compare,
    exposed_s,
    fresh,
    is_first,
    keep_runs,
    plain_step,
    plans_of,
    prediction_of,
    race_json,
    say_on_first,
    take_turns,
    taken_gradients,
)
from benchmarks.torch_pipelines import KINDS, TORCH_1F1B, torch_step
from stretto.errors import RunError, UsageError, meant
from stretto.ir.plan import Plan
from stretto.ir.stage_maps import AUTO, stage_map_of
from stretto.ir.timeline import Timeline
from stretto.measure.measured import measured_costs
from stretto.models.gpt import Block, GPTConfig
from stretto.planning.make_plan import make_plan
from stretto.planning.schedules import choose_schedule
from stretto.schedule.families import FAMILIES

WORKER = "pipeline"
"""The module of this room that every rank runs."""

ALL = "all"

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PipelineRace:
    """One race. layers: of the full model, a multiple of all numbers of stages. families: those of ours that
    race, and "auto"."""

    rate: str = "100mbit"
    hidden: int = 512
    heads: int = 8
    layers: int = 8
    sequence: int = 256
    microbatches: int = 8
    microbatch_size: int = 1
    world: int = 2
    threads_per_rank: int = 1
    rounds: int = 7
    families: Sequence[str] = (*FAMILIES, AUTO)
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.world} hosts, {self.rate}"

    def build(self) -> tuple[Blocks, Batch]:
        """The model and a batch, equal in all processes."""
        torch.manual_seed(0)
        model = Blocks(self)
        size = (self.microbatches * self.microbatch_size, self.sequence, self.hidden)
        return model, {"x": torch.randn(size), "target": torch.randn(size)}

    def cuts(self, stages: int) -> list[int]:
        """The blocks with which all stages but the first begin: equal numbers in each."""
        each, left = divmod(self.layers, stages)
        if left or not each:
            raise UsageError(f"{self.layers} blocks make no {stages} equal stages")
        return [each * stage for stage in range(1, stages)]


class Blocks(nn.Sequential):
    """A stack of transformer blocks on (B, S, D) activations: what the middle of a GPT computes."""

    def __init__(self, setup: PipelineRace) -> None:
        config = GPTConfig(
            vocab_size=1,
            layers=setup.layers,
            hidden=setup.hidden,
            heads=setup.heads,
            context=setup.sequence,
            positions="learned",
        )
        super().__init__(*(Block(config) for _ in range(config.layers)))


def squared_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error of the stack's output against a target, both (B, S, D)."""
    return nn.functional.mse_loss(model(batch["x"]), batch["target"])


HOSTS = {2: PipelineRace(world=2), 4: PipelineRace(world=4)}
"""Number of hosts -> the race; all have the same model and microbatches."""


def races(rate: str, hosts: Sequence[int], families: Sequence[str], *, rounds: int) -> list[PipelineRace]:
    """One race for each number of hosts."""
    return [replace(HOSTS[world], rate=rate, families=families, rounds=rounds) for world in hosts]


def chosen(words: Sequence[str]) -> list[str]:
    """Families by their names, in the order in which they are listed; `ALL` is all of them. Raises UsageError
    for another word."""
    known = (*FAMILIES, AUTO)
    unknown = [word for word in words if word not in (*known, ALL)]
    if unknown or not words:
        near = meant(unknown[0], (*known, ALL)) if unknown else ""
        raise UsageError(
            f"--families {','.join(words)}: {near}choose {ALL}, or of {', '.join(known)}, with commas between"
        )
    return [name for name in known if ALL in words or name in words]


def make_result(
    setup: PipelineRace,
    plans: Mapping[str, Plan],
    times: Mapping[str, Times],
    timelines: Mapping[str, Sequence[Timeline]],
    **more: Any,
) -> dict[str, Any]:
    """The JSON of the race. The bound is the least of all plans'."""
    binding = min(map(prediction_of, plans.values()), key=lambda one: one.bound_us)
    best = min((name for name in times if name in KINDS), key=lambda name: times[name].median_s)
    bases_s = {"torch_1f1b": times[TORCH_1F1B].median_s, "torch_best": times[best].median_s}
    own = {
        name: {
            "exposed_s": max(exposed_s(timelines[name])),
            "predicted_s": prediction_of(plan).step_us / 1e6,
            "bound_s": prediction_of(plan).bound_us / 1e6,
            "peak_bytes": list(timelines[name][-1].peak_bytes),
        }
        for name, plan in plans.items()
    }
    return race_json(setup, times, bases_s, binding, own, torch_best=best, **more)


def run_worker(setup: PipelineRace, kept: str = "") -> Any:
    """One rank of the race. kept: where rank 0 keeps what ran, a folder for each family. Raises RunError when
    losses or gradients disagree."""
    model, batch = setup.build()
    # 1. Plans.
    plans = _plans(setup, model, batch)
    # Stages are placed differently, and a model of which a Runner has taken a step is old on other ranks.
    runners = {family: stretto.Runner(plan, copy.deepcopy(model)) for family, plan in plans.items()}
    torchs = {
        name: fresh(model.parameters(), torch_step(kind, setup, model, batch, dist.get_rank()))
        for name, kind in KINDS.items()
    }
    # 2. The same numbers.
    systems: dict[str, tuple[RaceStep, nn.Module | stretto.Runner]] = {
        name: (step, model) for name, step in torchs.items()
    }
    for family, runner in runners.items():
        systems[family] = partial(runner.step, batch), runner
    error = _check_equal(setup, systems, model, batch)
    # 3. In turn.
    times, timelines = take_turns(runners, torchs, batch, setup.rounds)
    if not is_first():
        return None
    keep_runs(kept, runners, timelines)
    return make_result(setup, plans_of(runners), times, timelines, worst_error_vs_plain=error)


def _plans(setup: PipelineRace, model: Blocks, batch: Batch) -> dict[str, Plan]:
    """Step 1, by family; of "auto", the faster of one and two stages a rank."""
    plans: dict[str, Plan] = {}
    numbers = {stage_map_of(family).usual for family in setup.families}
    for each in sorted({1, 2} if AUTO in setup.families else numbers):
        alike = [family for family in setup.families if family == AUTO or stage_map_of(family).usual == each]
        say_on_first(f"capturing with {each} stages a rank, and measuring this network")
        parallel = stretto.Parallel(
            pp=setup.world,
            virtual_stages=each,
            microbatches=setup.microbatches,
            schedule="interleaved-1f1b" if each > 1 else "1f1b",
            split=list(map(str, setup.cuts(setup.world * each))),
        )
        job = stretto.capture(model, batch, loss=squared_error, parallel=parallel)
        costs = measured_costs(job, choose_schedule(job))
        for family in alike:
            plan = make_plan(job, costs, schedule=family)
            step_us = prediction_of(plan).step_us
            say_on_first(f"{family}: predicted {step_us / 1e6:.3f} s")
            if family not in plans or step_us < prediction_of(plans[family]).step_us:
                plans[family] = plan
    return {family: plans[family] for family in setup.families}


def _check_equal(
    setup: PipelineRace,
    systems: dict[str, tuple[RaceStep, nn.Module | stretto.Runner]],
    model: Blocks,
    batch: Batch,
) -> float:
    """Step 2. systems: a step, and what has its gradients. Returns the worst relative error of a gradient
    against the plain model's."""
    plain_loss, plain = plain_step(model, batch, squared_error, setup.microbatches)
    worst = 0.0
    for name, (step, trained) in systems.items():
        say_on_first(f"the first step of {name}")
        dist.barrier()
        loss = step()
        grads = taken_gradients(trained)
        of_ranks: list[Any] = [None] * setup.world
        dist.all_gather_object(of_ranks, (None if loss is None else float(loss), list(grads)))
        check_ranks(name, of_ranks, plain_loss, list(plain))
        worst = max(worst, compare(name, grads, {key: plain[key] for key in grads}, "the plain model"))
    return worst


def check_ranks(
    name: str, of_ranks: list[tuple[float | None, list[str]]], plain_loss: float, parameters: list[str]
) -> None:
    """of_ranks: by rank, the loss where it has one, and whose gradients it has. Raises RunError where no loss
    is the plain model's, another is, or the gradient of a parameter is not on exactly one rank."""
    losses = [loss for loss, _ in of_ranks if loss is not None]
    if not losses:
        raise RunError(f"the loss of {name} is nowhere, the plain model's {plain_loss}")
    for loss in losses:
        check_loss(name, loss, plain_loss)
    if sorted(key for _, keys in of_ranks for key in keys) != sorted(parameters):
        raise RunError(f"the ranks of {name} do not have the gradient of each parameter once")


SETUP = PipelineRace
"""What a worker of this module takes."""
