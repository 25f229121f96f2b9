"""The pipeline race: PyTorch's own pipelining and families of ours over the same slow links.

A stack of transformer blocks, mean squared error, float32, one thread a rank. A worker (`run_worker`, once on
each host):

    1. captures the step once for each number of stages a rank, and measures its costs on this network; the
       plans of families are made from them;
    2. runs every system once: loss and gradients must be those of the plain model, or the race is void;
    3. lets the systems take turns (`benchmarks.race`), and keeps the timeline of each of ours.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import stretto
from benchmarks.kept import keep_run, prediction_of
from benchmarks.pipeline_result import make_result
from benchmarks.pipeline_setup import Batch, Blocks, Setup, squared_error
from benchmarks.race import SAME, Step, compare, drop_gradients, fresh, is_first, say_on_first
from benchmarks.raced import plans_of, take_turns
from benchmarks.torch_pipelines import KINDS, torch_step
from stretto.errors import RunError
from stretto.ir.plan import Plan
from stretto.ir.stage_maps import AUTO, places_of
from stretto.measure.measured import measured_costs
from stretto.planning.choose import choose_schedule
from stretto.planning.make_plan import make_plan


def run_worker(setup: Setup, kept: str = "") -> Any:
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
    systems: dict[str, tuple[Step, nn.Module | stretto.Runner]] = {
        name: (step, model) for name, step in torchs.items()
    }
    for family, runner in runners.items():
        systems[family] = partial(runner.step, batch), runner
    error = _check_equal(setup, systems, model, batch)
    # 3. In turn.
    times, timelines = take_turns(runners, torchs, batch, setup.rounds)
    if not is_first():
        return None
    result = make_result(setup, plans, times, timelines)
    result["setup"]["worst_error_vs_plain"] = error
    if kept:
        for name, plan in plans_of(runners).items():
            keep_run(Path(kept) / name, plan, plan, timelines[name])
    return result


def _plans(setup: Setup, model: Blocks, batch: Batch) -> dict[str, Plan]:
    """Step 1, by family; of "auto", the faster of one and two stages a rank."""
    plans: dict[str, Plan] = {}
    numbers = {places_of(family).usual for family in setup.families}
    for each in sorted({1, 2} if AUTO in setup.families else numbers):
        alike = [family for family in setup.families if family == AUTO or places_of(family).usual == each]
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
    setup: Setup, systems: dict[str, tuple[Step, nn.Module | stretto.Runner]], model: Blocks, batch: Batch
) -> float:
    """Step 2. systems: a step, and what has its gradients. Returns the worst relative error of a gradient
    against the plain model's."""
    plain_loss, plain = _plain(setup, model, batch)
    worst = 0.0
    for name, (step, trained) in systems.items():
        say_on_first(f"the first step of {name}")
        dist.barrier()
        loss = step()
        found = {key: p.grad.clone() for key, p in trained.named_parameters() if p.grad is not None}
        drop_gradients(trained.parameters())
        told: list[Any] = [None] * setup.world
        dist.all_gather_object(told, (None if loss is None else float(loss), list(found)))
        check_told(name, told, plain_loss, list(plain))
        worst = max(worst, compare(name, found, {key: plain[key] for key in found}, "the plain model"))
    return worst


def check_told(
    name: str, told: list[tuple[float | None, list[str]]], plain_loss: float, parameters: list[str]
) -> None:
    """told: by rank, the loss where it has one, and whose gradients it has. Raises RunError where no loss is
    the plain model's, another is, or the gradient of a parameter is not on exactly one rank."""
    losses = [loss for loss, _ in told if loss is not None]
    wrong = [loss for loss in losses if abs(loss / plain_loss - 1.0) > SAME]
    if wrong or not losses:
        raise RunError(
            f"the loss of {name} is {wrong[0] if wrong else 'nowhere'}, the plain model's {plain_loss}"
        )
    held = sorted(key for _, keys in told for key in keys)
    if held != sorted(parameters):
        raise RunError(f"the ranks of {name} do not hold the gradient of each parameter once")


def _plain(setup: Setup, model: Blocks, batch: Batch) -> tuple[float, Batch]:
    """The plain model's loss and gradients; every rank computes them all."""
    total = 0.0
    for rows in range(0, len(batch["x"]), setup.microbatch_size):
        some = {name: leaf[rows : rows + setup.microbatch_size] for name, leaf in batch.items()}
        loss = squared_error(model, some) / setup.microbatches
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    drop_gradients(model.parameters())
    return total, grads
