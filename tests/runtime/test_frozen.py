"""Parameters that are frozen, unfrozen or added after the capture: right gradients, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.ir.serialize import plan_from_text, plan_to_text
from stretto.models.gpt import next_token_loss
from tests.capturing.zoo import Chain, mean_square, rows
from tests.clusters import cores
from tests.runtime.equality import gpt, tokens

CLUSTER = cores()
AGAIN = "to train others, capture again"


def plan_of(model: nn.Module, **layout: int) -> stretto.Plan:
    job = stretto.capture(model, rows(), mean_square, stretto.Parallel(microbatches=2, **layout))
    return stretto.plan(job, CLUSTER, order="list")


def frozen_chain() -> nn.Module:
    model = Chain()
    model.get_submodule("layers.0").requires_grad_(False)
    return model


def told(plan: stretto.Plan, models: list[nn.Module], work: Callable[[stretto.Runner], Any]) -> list[str]:
    """What each rank refuses."""

    def caught(runner: stretto.Runner) -> str:
        try:
            work(runner)
        except stretto.UsageError as error:
            return str(error)
        return ""

    return stretto.run_threads(plan, models.__getitem__, caught)


def by_the_model(_: stretto.Runner, model: nn.Module) -> None:
    model.get_submodule("layers.0").requires_grad_(True)


def by_the_runner(runner: stretto.Runner, _: nn.Module) -> None:
    for parameter in runner.parameters():
        parameter.requires_grad_(True)


@pytest.mark.parametrize(("pp", "unfreeze"), [(2, by_the_model), (1, by_the_model), (1, by_the_runner)])
def test_unfrozen_since_the_capture_is_refused_on_all_ranks(pp: int, unfreeze: Callable[..., None]) -> None:
    """The rank that does not train it refuses to change its flag, the other one to step."""
    models = [frozen_chain() for _ in range(pp)]

    def work(runner: stretto.Runner) -> None:
        runner.step(rows())
        unfreeze(runner, models[runner.rank])
        runner.step(rows())

    for text in told(plan_of(frozen_chain(), pp=pp), models, work):
        assert "the model's 'layers.0.weight'" in text
        assert AGAIN in text
    with pytest.raises(stretto.UsageError, match="which was frozen when it was captured"):
        stretto.run_threads(plan_of(frozen_chain(), pp=pp), lambda _: Chain(), lambda runner: None)


def test_frozen_after_the_capture_has_no_gradient_and_the_rest_is_right() -> None:
    plan = plan_of(Chain(), pp=2)
    model = frozen_chain()
    (mean_square(model, rows()[:4]) + mean_square(model, rows()[4:])).div(2).backward()

    def work(runner: stretto.Runner) -> dict[str, Tensor | None]:
        runner.step(rows())
        return {name: p.grad for name, p in runner.named_parameters()}

    kept = stretto.run_threads(plan, lambda _: frozen_chain(), work)
    found = {name: grad for grads in kept for name, grad in grads.items()}
    torch.testing.assert_close(
        found, {name: p.grad for name, p in model.named_parameters()}, rtol=1e-10, atol=0
    )


def test_a_sharded_parameter_is_frozen_in_the_runner_alone() -> None:
    """It is trained in a tensor of the Runner's own, and the model's refuses."""
    model, batch = gpt(True), tokens(4, columns=8)
    with pytest.warns(UserWarning, match="is not sharded"):
        job = stretto.capture(model, batch, next_token_loss, stretto.Parallel(tp=2, microbatches=2))
    plan = stretto.plan(job, CLUSTER, order="list")
    models = [copy.deepcopy(model) for _ in range(2)]
    name = "blocks.0.mlp.up.weight"
    assert {p.name: p.shards for p in job.parameters}[name]

    def work(runner: stretto.Runner) -> list[bool]:
        part, found = dict(runner.named_parameters())[name], []
        with pytest.raises(stretto.UsageError, match=AGAIN):
            models[runner.rank].get_parameter(name).requires_grad_(False)
        with pytest.raises(stretto.UsageError, match=AGAIN):
            models[runner.rank].get_parameter(name).requires_grad = False
        for trains in (True, False, True):
            part.requires_grad_(trains)
            part.grad = None
            runner.step(batch)
            found.append(part.grad is not None)
        return found

    assert stretto.run_threads(plan, models.__getitem__, work) == [[True, False, True]] * 2


def test_a_parameter_that_the_captured_model_did_not_have() -> None:
    model = Chain()
    plan = plan_of(model)
    model.get_submodule("layers.0").adapter = nn.Linear(8, 8).double()
    with pytest.raises(stretto.UsageError) as caught:
        stretto.Runner(plan, model)
    said = "'layers.0.adapter.weight', which was frozen when it was captured, or not there, but trains now"
    assert said in str(caught.value)
    model.get_submodule("layers.0.adapter").requires_grad_(False)
    stretto.Runner(plan, model).step(rows())


def test_a_plan_file_says_what_was_frozen() -> None:
    plan = plan_of(frozen_chain(), pp=2)
    text = plan_to_text(plan)
    assert text.count('"frozen": true') == 2
    read = plan_from_text(text)
    assert [p.name for p in read.job.parameters if p.frozen] == ["layers.0.weight", "layers.0.bias"]
    with pytest.raises(stretto.UsageError, match=r"parameters\[0\].frozen: expected true or false, found 1"):
        plan_from_text(text.replace('"frozen": true', '"frozen": 1', 1))
