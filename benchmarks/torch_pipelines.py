"""PyTorch's pipelining in a race: its schedules on a rank's blocks, with the parameters that ours use.

Its zero bubble schedules refuse torch.compile, so all run without it. Touches public names of
`torch.distributed.pipelining` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from benchmarks.pipeline_setup import Batch, Blocks, Setup
from benchmarks.race import Step
from stretto.ir.stage_maps import loop, v


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule of PyTorch's, and where it has its stages. listed: whether it takes a list of them."""

    schedule: Any
    virtual_stages: int = 1
    places: Callable[[int, int], tuple[int, ...]] = loop
    listed: bool = True


TORCH_1F1B = "torch 1f1b"

KINDS = {
    "torch gpipe": Kind(ScheduleGPipe, listed=False),
    TORCH_1F1B: Kind(Schedule1F1B, listed=False),
    "torch zero bubble": Kind(ScheduleInterleavedZeroBubble),
    "torch looped bfs": Kind(ScheduleLoopedBFS, 2),
    "torch interleaved 1f1b": Kind(ScheduleInterleaved1F1B, 2),
    "torch interleaved zero bubble": Kind(ScheduleInterleavedZeroBubble, 2),
    "torch zb-v": Kind(ScheduleZBVZeroBubble, 2, v),
    "torch dualpipev": Kind(ScheduleDualPipeV, 2, v),
}
"""By the names under which they race."""


def torch_step(kind: Kind, setup: Setup, model: Blocks, batch: Batch, rank: int) -> Step:
    """One step of a schedule on this rank's blocks; on the rank of the last stage it gives the loss, which is
    the mean over microbatches."""
    stages = setup.world * kind.virtual_stages
    ends = [0, *setup.cuts(stages), setup.layers]
    mine = [stage for stage, at in enumerate(kind.places(setup.world, kind.virtual_stages)) if at == rank]
    made = [
        PipelineStage(
            nn.Sequential(*list(model)[ends[stage] : ends[stage + 1]]), stage, stages, torch.device("cpu")
        )
        for stage in mine
    ]
    schedule = kind.schedule(
        made if kind.listed else made[0], setup.microbatches, loss_fn=nn.functional.mse_loss
    )
    inputs = (batch["x"],) if 0 in mine else ()

    def step() -> torch.Tensor | None:
        if stages - 1 not in mine:
            schedule.step(*inputs)
            return None
        losses: list[torch.Tensor] = []
        schedule.step(*inputs, target=batch["target"], losses=losses)
        return torch.stack(losses).mean().detach()

    return step
