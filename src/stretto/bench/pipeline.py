"""The pipeline race: PyTorch's own pipelining and every family of ours over the same slow link.

Two ranks, a stack of transformer blocks, mean squared error, float32, one thread a rank. A worker
(`run_worker`, once on each host) builds all systems on the same parameters, checks that their
gradients agree, and lets them take turns. Touches `torch.distributed.pipelining`'s public names only.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

import stretto
from stretto.bench.kept import prediction_of
from stretto.bench.race import Times, compare, fresh, race, say_on_first
from stretto.ir.timeline import SpanKind
from stretto.models.gpt import Block, GPTConfig
from stretto.planning.make_plan import make_plan
from stretto.schedule.one_stage import ONE_STAGE

TORCH_1F1B = "torch 1f1b"

FAMILIES = tuple(family.name for family in ONE_STAGE)
"""Families that race: PyTorch's stages are cut as theirs are, one a rank."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The work of the race. Shapes are those of one rank's stage and one microbatch."""

    rate: str = "100mbit"
    hidden: int = 512
    heads: int = 8
    layers_per_stage: int = 4
    sequence: int = 256
    microbatches: int = 8
    microbatch_size: int = 1
    world: int = 2
    threads_per_rank: int = 1
    rounds: int = 7
    dtype: str = "float32"


class Blocks(nn.Sequential):
    """A stack of transformer blocks on (B, S, D) activations: what the middle of a GPT computes."""

    def __init__(self, setup: Setup) -> None:
        config = GPTConfig(
            vocab_size=1,
            layers=setup.layers_per_stage * setup.world,
            hidden=setup.hidden,
            heads=setup.heads,
            context=setup.sequence,
            positions="learned",
        )
        super().__init__(*(Block(config) for _ in range(config.layers)))


def squared_error(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean squared error of the stack's output against a target, both (B, S, D)."""
    return nn.functional.mse_loss(model(batch["x"]), batch["target"])


def run_worker(setup: Setup) -> dict[str, Any]:
    """One rank of the race. Raises RunError when gradients disagree."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Blocks(setup)
    size = (setup.microbatches * setup.microbatch_size, setup.sequence, setup.hidden)
    batch = {"x": torch.randn(size), "target": torch.randn(size)}

    say_on_first("capturing, and measuring this machine")
    systems: dict[str, Callable[[], object]] = _torch_systems(setup, model, batch, rank)
    runners: dict[str, stretto.Runner] = {}
    parallel = stretto.Parallel(pp=setup.world, microbatches=setup.microbatches, split=_split(setup))
    job = stretto.capture(model, batch, loss=squared_error, parallel=parallel)
    costs = stretto.plan(job, "local", schedule="1f1b").costs
    for family in FAMILIES:
        plan = make_plan(job, costs, schedule=family)
        runners[family] = stretto.Runner(plan, model)
        systems[family] = fresh(model.parameters(), partial(runners[family].step, batch))
    _check_equal(systems, runners[FAMILIES[0]])

    exposed: dict[str, list[float]] = {name: [] for name in runners}

    def after(name: str) -> None:
        if name in runners:
            timeline = runners[name].timeline()
            exposed[name].append(max(timeline.by_rank(SpanKind.EXPOSED)) / 1e6)

    times = race(systems, setup.rounds, after=after, say=say_on_first)
    return _result(setup, times, runners, exposed)


def _split(setup: Setup) -> list[str]:
    return [str(setup.layers_per_stage * stage) for stage in range(1, setup.world)]


def _torch_systems(
    setup: Setup, model: Blocks, batch: dict[str, torch.Tensor], rank: int
) -> dict[str, Callable[[], object]]:
    """PyTorch's schedules on this rank's layers: the same modules and parameters as ours."""
    first = rank * setup.layers_per_stage
    mine = nn.Sequential(*list(model)[first : first + setup.layers_per_stage])
    kinds: dict[str, Any] = {
        "torch gpipe": ScheduleGPipe,
        TORCH_1F1B: Schedule1F1B,
        "torch zero bubble": ScheduleInterleavedZeroBubble,
    }
    systems: dict[str, Callable[[], object]] = {}
    for name, kind in kinds.items():
        stage = PipelineStage(mine, rank, setup.world, torch.device("cpu"))
        several = kind is ScheduleInterleavedZeroBubble
        schedule = kind([stage] if several else stage, setup.microbatches, loss_fn=nn.functional.mse_loss)

        def step(schedule: Any = schedule) -> None:
            if rank == 0:
                schedule.step(batch["x"])
            elif rank == setup.world - 1:
                schedule.step(target=batch["target"], losses=[])
            else:
                schedule.step()

        systems[name] = fresh(model.parameters(), step)
    return systems


def _check_equal(systems: dict[str, Callable[[], object]], runner: stretto.Runner) -> None:
    """All systems compute the same gradients, or the race is void."""
    reference: dict[str, torch.Tensor] = {}
    for name, step in systems.items():
        dist.barrier()
        step()
        grads = {key: p.grad.clone() for key, p in runner.named_parameters() if p.grad is not None}
        reference = reference or grads
        compare(name, grads, reference, next(iter(systems)))


def _result(
    setup: Setup,
    times: dict[str, Times],
    runners: dict[str, stretto.Runner],
    exposed: dict[str, list[float]],
) -> dict[str, Any]:
    """The JSON of the race: {"setup": ..., "rows": [...]}, medians, with every round's time beside them."""
    predictions = {name: prediction_of(runner.plan) for name, runner in runners.items()}
    bound_s = min(found.bound_us for found in predictions.values()) / 1e6
    base = times[TORCH_1F1B].median_s
    rows = []
    for name, found in times.items():
        prediction = predictions.get(name)
        waits = sorted(exposed.get(name, []))
        rows.append(
            {
                "system": name,
                "step_s": found.median_s,
                "speedup_vs_torch_1f1b": base / found.median_s,
                "ratio_to_bound": found.median_s / bound_s,
                "exposed_s": waits[len(waits) // 2] if waits else None,
                "predicted_s": prediction.step_us / 1e6 if prediction is not None else None,
                "rounds_s": list(found.rounds),
            }
        )
    any_plan = next(iter(runners.values())).plan
    return {
        "setup": {
            **asdict(setup),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "bound_s": bound_s,
            "binds": prediction_of(any_plan).binds,
        },
        "rows": rows,
    }
