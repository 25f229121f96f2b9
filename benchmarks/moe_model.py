"""What the race of experts trains: a stack of blocks with experts on activations, as the middle of a model.

The router is the model's own, or one that sends every token to the next experts in turn, so that all get the
same number of every chunk (Megatron's forced load balancing draws them by chance, which evens out on average
only). A capacity then drops nothing; with the router's own choices all are served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.models.moe import EP_PLAN, MoE, MoEBlock, MoEConfig, Routed, Router, weighed

Routing = Literal["balanced", "router"]
ROUTINGS: tuple[Routing, ...] = ("balanced", "router")

INIT_STD = 0.02
"""As GPT-2's."""


class EvenRouter(Router):
    """Token n goes to experts n K, n K + 1, ... in turn; their weights are what it scores them."""

    def forward(self, x_ND: Tensor) -> Routed:
        score_NE = F.linear(x_ND, self.weight).softmax(dim=-1)
        N, E = score_NE.shape
        first_N1 = torch.arange(0, N * self.top_k, self.top_k, device=x_ND.device).unsqueeze(1)
        chosen_NK = (first_N1 + torch.arange(self.top_k, device=x_ND.device)) % E
        return Routed(chosen_NK, weighed(score_NE.gather(1, chosen_NK)), score_NE.new_zeros(2))


class Stack(nn.Module):
    """Blocks with experts: (B, S, D) to the same and the routers' losses. Equal in all processes."""

    ep_plan: ClassVar[Mapping[str, str]] = EP_PLAN

    def __init__(self, config: MoEConfig, routing: Routing) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MoEBlock(config, dense=False) for _ in range(config.layers))
        for block in self.blocks if routing == "balanced" else ():
            assert isinstance(block, MoEBlock)
            assert isinstance(block.mlp, MoE)
            block.mlp.router = EvenRouter(config)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INIT_STD, generator=generator)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        losses = x_BSD.new_zeros(2)
        for block in self.blocks:
            x_BSD, losses = block(x_BSD, losses)
        return x_BSD, losses


def squared_error(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean squared error against a target (B, S, D), with the routers' weighted losses."""
    made_BSD, losses = model(batch["x"])
    config = model.config
    assert isinstance(config, MoEConfig)
    balance, z = losses.unbind()
    routers: Tensor = config.aux_weight * balance + config.z_weight * z
    return F.mse_loss(made_BSD, batch["target"]) + routers
