"""Routers of the mixture: what they weigh experts by, and what they learn from."""

from __future__ import annotations

import pytest
import torch
from benchmarks.moe_model import EvenRouter
from torch import Tensor

from stretto.models.dispatch import inverse, rows_at, with_nothing, within_capacity
from stretto.models.moe import MoE, MoEConfig, MoEGPT, Router, moe_token_sum


def config(top_k: int) -> MoEConfig:
    sizes = {"vocab_size": 16, "layers": 1, "hidden": 8, "heads": 2, "context": 8, "experts": 4}
    return MoEConfig(**sizes, top_k=top_k, capacity_factor=None, aux_weight=0.0, z_weight=0.0)


def tokens() -> Tensor:
    return torch.randint(0, 16, (4, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_loss_of_text_reaches_the_router(top_k: int) -> None:
    model = MoEGPT(config(top_k), seed=2).double()
    moe_token_sum(model, tokens())[0].backward()
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


def test_gradients_of_gathered_rows_are_those_of_indexing() -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([4, 5, 0, 2, 5, 4])  # 5: nothing
    back = torch.tensor([[2, 6, 3, 6, 0], [6, 6, 6, 6, 5]])  # 6: nowhere
    g = torch.randn(6, 3, dtype=torch.float64)
    made = rows_at(x, at, back)
    (got,) = torch.autograd.grad(made, x, g)
    plain = with_nothing(x)[at]
    (want,) = torch.autograd.grad(plain, x, g)
    assert torch.equal(made, plain)
    assert torch.equal(got, want)


def test_an_order_and_its_inverse() -> None:
    order = torch.randperm(17, generator=torch.Generator().manual_seed(2))
    assert torch.equal(inverse(order), order.argsort())


def test_first_choices_and_earlier_tokens_are_served_first() -> None:
    """Two slots an expert; all tokens choose expert 1 first and expert 0 second."""
    x = torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(1)
    chosen = torch.tensor([[1, 0]] * 4)
    weights = torch.tensor([[10.0, 1.0]] * 4, dtype=torch.float64)
    seen: list[Tensor] = []

    def of_slots(x_ECD: Tensor) -> Tensor:
        seen.append(x_ECD)
        return x_ECD

    made = within_capacity(x, chosen, weights, 3, 2, of_slots)
    assert seen[0].flatten(1).tolist() == [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]
    assert made.flatten().tolist() == [11.0, 22.0, 0.0, 0.0]
