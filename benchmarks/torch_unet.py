"""A U-Net of `diffusers` over two ranks with PyTorch's own pipelining, which takes a chain of modules.

A message goes from one stage to the next, so what crosses is what the first stage returns: the hidden state,
what the time step says, and a tuple of all skips that are left. Each half is written out by hand, after
`UNet2DConditionModel.forward`; over three stages every skip would travel through those between.

Public names of `torch.distributed.pipelining` and of `diffusers` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

from benchmarks.racing import RaceStep

CUT = "up_blocks.1.resnets.1"
"""The module that begins the second stage: three of the eight skips are used up before it."""

SCHEDULES: Mapping[str, Any] = {
    "torch gpipe": ScheduleGPipe,
    "torch 1f1b": Schedule1F1B,
    "torch zero bubble": ScheduleInterleavedZeroBubble,
}

_OF_SEVERAL = (ScheduleInterleavedZeroBubble,)
"""Schedules that are given a list of stages."""


class Before(nn.Module):
    """All that is in front of `CUT`."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.time_proj, self.time_embedding = unet.time_proj, unet.time_embedding
        self.conv_in, self.down_blocks, self.mid_block = unet.conv_in, unet.down_blocks, unet.mid_block
        self.lowest = unet.up_blocks[0]
        self.resnet, self.attention = unet.up_blocks[1].resnets[0], unet.up_blocks[1].attentions[0]

    def forward(self, image: Tensor, time: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        emb = self.time_embedding(self.time_proj(time).to(image.dtype))
        hidden = self.conv_in(image)
        skips: tuple[Tensor, ...] = (hidden,)
        for block in self.down_blocks:
            given = {"encoder_hidden_states": states} if _attends(block) else {}
            hidden, made = block(hidden_states=hidden, temb=emb, **given)
            skips += made
        hidden = self.mid_block(hidden, emb, encoder_hidden_states=states)
        hidden, skips = _up(self.lowest, hidden, emb, skips, states)
        hidden = self.resnet(torch.cat([hidden, skips[-1]], dim=1), emb)
        hidden = self.attention(hidden, encoder_hidden_states=states, return_dict=False)[0]
        # PyTorch's stages send only what has no gaps.
        return tuple(value.contiguous() for value in (hidden, emb, *skips[:-1]))


class After(nn.Module):
    """`CUT` and all that is behind it."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        block = unet.up_blocks[1]
        self.resnet, self.attention = block.resnets[1], block.attentions[1]
        self.upsampler = block.upsamplers[0]
        self.up_blocks = unet.up_blocks[2:]
        self.norm, self.act, self.conv = unet.conv_norm_out, unet.conv_act, unet.conv_out

    def forward(self, hidden: Tensor, emb: Tensor, *skips: Tensor, states: Tensor) -> Tensor:
        for value in (hidden, emb, *skips):
            if value.requires_grad:  # its gradient is sent
                value.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        hidden = self.resnet(torch.cat([hidden, skips[-1]], dim=1), emb)
        hidden = self.attention(hidden, encoder_hidden_states=states, return_dict=False)[0]
        hidden, skips = self.upsampler(hidden), skips[:-1]
        for block in self.up_blocks:
            hidden, skips = _up(block, hidden, emb, skips, states)
        made: Tensor = self.conv(self.act(self.norm(hidden)))
        return made


def _up(
    block: Any, hidden: Tensor, emb: Tensor, skips: tuple[Tensor, ...], states: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The hidden state behind a block of the decoder, and the skips that it leaves."""
    left = len(skips) - len(block.resnets)
    given = {"encoder_hidden_states": states} if _attends(block) else {}
    made = block(hidden_states=hidden, temb=emb, res_hidden_states_tuple=skips[left:], **given)
    return made, skips[:left]


def _attends(block: Any) -> bool:
    return bool(getattr(block, "has_cross_attention", False))


def torch_steps(
    unet: nn.Module, batch: Mapping[str, Tensor], microbatches: int, rank: int
) -> dict[str, RaceStep]:
    """By name of the schedule, one step of this rank, on the parameters of the model itself; on the second
    rank it gives the loss, which is the mean over microbatches."""
    half = Before(unet) if rank == 0 else After(unet)
    result: dict[str, RaceStep] = {}
    for name, kind in SCHEDULES.items():
        stage = PipelineStage(half, rank, 2, torch.device("cpu"))
        schedule = kind(
            [stage] if kind in _OF_SEVERAL else stage, microbatches, loss_fn=nn.functional.mse_loss
        )

        def step(schedule: Any = schedule) -> Tensor | None:
            if rank == 0:
                schedule.step(batch["image"], time=batch["time"], states=batch["states"])
                return None
            losses: list[Tensor] = []
            schedule.step(target=batch["noise"], losses=losses, states=batch["states"])
            return torch.stack(losses).mean().detach()

        result[name] = step
    return result
