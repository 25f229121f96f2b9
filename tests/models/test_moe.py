"""Routers of the mixture: what they weigh experts by, and what they learn from."""

from __future__ import annotations

import pytest
import torch
from benchmarks.moe_model import EvenRouter
from torch import Tensor

from stretto.models.moe import MoE, MoEConfig, MoEGPT, Router, moe_token_loss


def config(top_k: int) -> MoEConfig:
    sizes = {"vocab_size": 16, "layers": 1, "hidden": 8, "heads": 2, "context": 8, "experts": 4}
    return MoEConfig(**sizes, top_k=top_k, capacity_factor=None, aux_weight=0.0, z_weight=0.0)


def tokens() -> Tensor:
    return torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_loss_of_text_reaches_the_router(top_k: int) -> None:
    model = MoEGPT(config(top_k), seed=2).double()
    moe_token_loss(model, tokens()).backward()
    block = model.blocks[0].mlp
    assert isinstance(block, MoE)
    assert block.router.weight.grad is not None
    assert float(block.router.weight.grad.norm()) > 1e-6


@pytest.mark.parametrize("kind", [Router, EvenRouter])
def test_one_expert_is_weighed_by_its_probability_and_several_sum_to_one(kind: type[Router]) -> None:
    x_ND = torch.randn(5, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for top_k in (1, 2, 3):
        router = kind(config(top_k)).double()
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(4))
        routed = router(x_ND)
        score_NK = (x_ND @ router.weight.t()).softmax(-1).gather(1, routed.chosen)
        want = score_NK if top_k == 1 else score_NK / score_NK.sum(-1, keepdim=True)
        torch.testing.assert_close(routed.weights, want)
