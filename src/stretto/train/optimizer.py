"""AdamW over one rank's parameters."""

from __future__ import annotations

import torch

from stretto.config import OptimizerSettings
from stretto.runtime import Runner


def make_optimizer(runner: Runner, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019) with decay on matrices only: a decayed norm's gain or bias would be
    pulled away from what the norm needs (as GPT-2's and Llama's recipes leave them out)."""
    matrices = [p for p in runner.parameters() if p.dim() >= 2]
    vectors = [p for p in runner.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        # A rank whose stages hold nothing has a group too, of no parameters: PyTorch wants one.
        [group for group in groups if group["params"]] or groups[:1],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of all groups from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
