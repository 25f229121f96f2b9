"""AdamW over one rank's parameters, and its learning rate as a pure function of the step: resuming needs no
state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from stretto.config import LRScheduleSettings, OptimizerSettings


def make_optimizer(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with decay on matrices only: a decayed norm's gain or bias would be
    pulled away from what the norm needs (as GPT-2's and Llama's recipes leave them out)."""
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def learning_rate(schedule: LRScheduleSettings, peak: float, steps: int, step: int) -> float:
    """The rate of step `step` (from 0) of `steps`; `peak` is the highest.

    It rises linearly over `warmup_steps`, the last of which has the highest rate, and then follows a half
    cosine (Loshchilov and Hutter, SGDR, 2017) or a line to `min_lr_ratio * peak` at the last step, or
    stays. Steps beyond the last keep its rate.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    way = steps - 1 - schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps) / way) if way > 0 else 1.0
    left = (1.0 + math.cos(math.pi * done)) / 2.0 if schedule.kind == "cosine" else 1.0 - done
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * left)
