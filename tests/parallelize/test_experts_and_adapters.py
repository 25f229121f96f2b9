"""Adapters of `peft` on models with experts: beside the experts, and on the experts' own parameters."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import StrettoError
from tests.parallelize.test_expert_trial import BATCH, SHARED, Base, Model, assert_equals, loss, model_of

PARAMETERS = {"target_modules": ["head"], "target_parameters": ["experts.up", "experts.down"]}


def adapted(**config: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = model_of(Base)
    model.ep_plan = {"experts": "experts"}
    found: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=2, **config)).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return found


def test_a_wrapper_has_the_plan_of_what_it_wraps() -> None:
    """Whose names are other ones."""
    assert_equals(adapted(target_modules=["head", "gate"]), ep_plan=None)


def test_adapters_of_experts_parameters_work_without_ep() -> None:
    """A forward that parametrizes its parameters for a time."""
    assert_equals(adapted(**PARAMETERS), ep=1, ep_plan=None, ep_buffer=None)


@pytest.mark.parametrize("plan", [None, {"base_model.model.experts.base_layer.base_layer": "experts"}])
def test_with_ep_they_are_refused(plan: dict[str, str] | None) -> None:
    with pytest.raises(StrettoError, match=re.escape("of all experts at once")) as caught:
        capture(adapted(**PARAMETERS), BATCH, loss, Parallel(**{**SHARED, "ep_plan": plan}))
    assert "base_model.model.experts" in str(caught.value)
    assert "adapt modules instead (target_modules), or give ep = 1" in str(caught.value)


class Parametrized(Model):
    """By PyTorch itself, around each call."""

    def forward(self, tokens: Tensor) -> Tensor:
        parametrize = nn.utils.parametrize
        parametrize.register_parametrization(self.head, "weight", _Doubled())
        try:
            return super().forward(tokens)
        finally:
            parametrize.remove_parametrizations(self.head, "weight", leave_parametrized=False)


class _Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.slow
def test_a_forward_may_parametrize_for_a_time() -> None:
    torch.manual_seed(3)
    model = Parametrized(Base()).double()
    names = [name for name, _ in model.named_parameters()]
    assert_equals(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert not dict(model.named_buffers())


class Replaced(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.head.weight
        del self.head.weight
        self.head.register_buffer("weight", weight * 2)
        return super().forward(tokens)


def test_another_tensor_is_refused_as_before() -> None:
    torch.manual_seed(3)
    with pytest.raises(StrettoError, match=r"in the place of parameter 'head\.weight'"):
        capture(Replaced(Base()).double(), BATCH, loss, Parallel(dp=2))
