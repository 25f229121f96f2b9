"""AdamW over one rank's parameters, and its state under the parameters' names in the model."""

from __future__ import annotations

import torch
from torch import nn

from stretto.config import OptimizerSettings
from stretto.runtime import Runner

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's averages of the gradient and of its square, as PyTorch names them."""


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
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of all groups from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_of(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """The parameter's state: its moments and its number of steps; made, with zeros, if there was none yet."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state
