"""Hooks on parameters act as in the plain model, once a step; those that cannot are refused.

A deep copy of a parameter has no hooks: every model here is made and hooked again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.models.gpt import next_token_loss
from stretto.runtime.runner import Runner
from tests.parallelize.equality import batch_of, gpt
from tests.saving.test_face import plan_of

SPREAD = "blocks.0.attention.qkv.weight"
Put = Callable[[nn.Module], Any]


def hooked(put: Put) -> nn.Module:
    """The model of `plan_of`, with hooks."""
    model = gpt(tie_embeddings=True, positions="learned").double()
    put(model)
    return model


def plain_step(model: nn.Module) -> None:
    batch = batch_of()
    pieces = [{k: v[m : m + 1] for k, v in batch.items()} for m in range(4)]
    torch.stack([next_token_loss(model, piece) for piece in pieces]).mean().backward()


def normed(model: nn.Module) -> None:
    """No two parts of a gradient give this of the full gradient."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / (1 + grad.norm()))
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


def sgd_within(model: nn.Module) -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.5)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("put", [normed, sgd_within])
@pytest.mark.parametrize("layout", ["one", "pp", "dp", "pp dp"])
def test_hooks_on_parameters_act_as_in_the_plain_model(layout: str, put: Put) -> None:
    """Of a tied parameter on two stages, too; gradients of two steps add up."""

    def work(runner: Runner) -> list[tuple[str, Tensor, Tensor | None]]:
        for _ in range(2):
            runner.step(batch_of())
        return [(name, p.detach(), p.grad) for name, p in runner.named_parameters()]

    own = hooked(put)
    for _ in range(2):
        plain_step(own)
    for found in stretto.run_threads(plan_of(layout), lambda _: hooked(put), work):
        for name, value, grad in found:
            expected = own.get_parameter(name)
            torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(grad, expected.grad, rtol=1e-9, atol=1e-12)


def test_they_run_once_a_step_in_autograds_order() -> None:
    """Hooks of several parameters and of autograd's own node, too, and those of the Runner's parts."""

    def work(runner: Runner) -> list[list[str]]:
        said: list[str] = []
        parameters = dict(runner.named_parameters())
        one = parameters["norm.weight"]
        one.register_post_accumulate_grad_hook(lambda p: said.append(f"after {p.grad is not None}"))
        one.register_hook(lambda grad: said.append("before"))
        (node, _), *_ = one.expand_as(one).grad_fn.next_functions  # type: ignore[union-attr]
        node.register_prehook(lambda grads: said.append("node"))
        several = [one, parameters[SPREAD]]
        torch.autograd.graph.register_multi_grad_hook(several, lambda grads: said.append(f"all {len(grads)}"))
        found = []
        for _ in range(2):
            runner.step(batch_of())
            found.append(sorted(said))
            said.clear()
        return found

    expected = ["after True", "all 2", "before", "node"]
    assert stretto.run_threads(plan_of("tp"), lambda _: hooked(lambda _: None), work) == [[expected] * 2] * 2


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("layout", ["tp", "pp tp"])
def test_a_hook_on_a_parameter_that_is_trained_in_parts_is_refused_on_all_ranks(
    layout: str, kind: str
) -> None:
    def put(model: nn.Module) -> None:
        getattr(model.get_parameter(SPREAD), kind)(lambda _: None)

    def made(rank: int) -> str:
        with pytest.raises(stretto.UsageError) as caught:
            stretto.Runner(plan_of(layout), hooked(put), transport=transports[rank])
        return str(caught.value)

    transports = stretto.runtime.transport.ThreadTransport.group(plan_of(layout).world)
    for rank in range(plan_of(layout).world):
        said = made(rank)
        assert f"'{SPREAD}', which has a hook, is not what is trained" in said
        assert "hooks take runner.parameters()" in said


def test_one_that_is_registered_later_is_refused() -> None:
    models = [hooked(lambda _: None) for _ in range(2)]

    def work(runner: Runner) -> str:
        runner.step(batch_of())
        with pytest.raises(stretto.UsageError) as caught:
            models[runner.rank].get_parameter(SPREAD).register_hook(lambda grad: grad * 2)
        return str(caught.value)

    assert all(SPREAD in said for said in stretto.run_threads(plan_of("tp"), models.__getitem__, work))


def test_a_hook_on_a_part_knows_that_its_gradient_is_of_one() -> None:
    def work(runner: Runner) -> str:
        dict(runner.named_parameters())[SPREAD].register_hook(lambda grad: grad / grad.norm())
        with pytest.raises(stretto.UsageError) as caught:
            runner.step(batch_of())
        return str(caught.value)

    found = stretto.run_threads(plan_of("tp"), lambda _: hooked(lambda _: None), work)
    assert all("this rank's part of a sharded" in said for said in found)


def test_one_that_is_frozen_since_the_capture_has_none() -> None:
    said: list[int] = []

    def work(runner: Runner) -> None:
        for parameter in runner.parameters():
            parameter.register_hook(lambda _: said.append(1))
            parameter.requires_grad_(False)
        runner.step(batch_of())

    stretto.run_threads(plan_of("one"), lambda _: hooked(lambda _: None), work)
    assert not said
