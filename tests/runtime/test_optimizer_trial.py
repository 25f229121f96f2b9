"""Optimizers that look at a full tensor, or at all parameters, on ranks that have parts: refused at their
first step; those that update each element by itself are not."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import stretto
from stretto.ir.plan import Plan
from stretto.models.gpt import GPT, GPTConfig, next_token_loss
from tests.clusters import cores

BATCH = torch.arange(36).reshape(4, 9) % 40

Make = Callable[[list[nn.Parameter]], Optimizer]


@functools.cache
def planned(**layout: Any) -> tuple[GPT, Plan]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=40, layers=2, hidden=16, heads=2, context=8)).double()
    job = stretto.capture(model, BATCH, next_token_loss, stretto.Parallel(microbatches=2, **layout))
    return model, stretto.plan(job, cores(), order="list")


def stepped(
    makes: Iterable[Make], only: Callable[[nn.Parameter], bool] = lambda _: True, **layout: Any
) -> None:
    """A step of each optimizer, on every rank, over its parameters."""
    model, plan = planned(**layout)

    def work(runner: stretto.Runner) -> None:
        runner.step(BATCH)
        for make in makes:
            made = make([p for p in runner.parameters() if only(p)])
            made.step()

    stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)


class _OfEach(Optimizer):
    """Gradient descent, with a rule for how far each tensor goes; an attribute besides the options."""

    def __init__(self, params: Any, rule: Callable[[Any, Any], Any], lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.as_subclass(torch.Tensor)
                    p.sub_(group["lr"] * self.rule(p, grad) * grad)


class _OfAll(Optimizer):
    """Normed by all gradients together."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        kept = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.as_subclass(torch.Tensor).square().sum()) for p in kept) ** 0.5
        for p in kept:
            p.sub_(p.grad, alpha=self.defaults["lr"] / norm)


LOOK: dict[str, Make] = {
    "Muon": lambda kept: torch.optim.Muon(kept),
    "Adafactor": lambda kept: torch.optim.Adafactor(kept),
    "LARS": lambda kept: _OfEach(kept, lambda p, grad: p.norm() / grad.norm(), 0.1),
    "a limit on each tensor's norm, at the start of a warm-up": lambda kept: _OfEach(
        kept, lambda p, grad: (1 / grad.norm()).clamp(max=1)
    ),
    "a rate by the tensor's size": lambda kept: _OfEach(kept, lambda p, grad: p.numel() ** -0.5, 0.1),
}


@pytest.mark.parametrize("kind", LOOK)
def test_who_looks_at_a_whole_tensor_is_refused_over_parts(kind: str) -> None:
    with pytest.raises(stretto.UsageError, match=r"looks at a full tensor.*has a part.*AdamW, SGD.*tp = ep"):
        stepped([LOOK[kind]], lambda p: p.dim() == 2, tp=2)


def test_of_what_is_whole_on_its_rank_it_is_not_refused() -> None:
    stepped(LOOK.values(), lambda p: p.dim() == 2, pp=2)
    # Gains of norms are full under tensor parallelism too.
    stepped([LOOK["LARS"]], lambda p: p.shape == (16,), tp=2)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}], ids=str)
def test_who_looks_at_all_parameters_is_refused_where_a_rank_lacks_some(layout: dict[str, Any]) -> None:
    model, plan = planned(**layout)

    def work(runner: stretto.Runner) -> None:
        optimizer = torch.optim.LBFGS(list(runner.parameters()), max_iter=2)
        optimizer.step(lambda: runner.step(BATCH))  # type: ignore[no-untyped-call]

    with pytest.raises(stretto.UsageError, match=r"LBFGS .*has a part.*(pp|tp) = "):
        stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    with pytest.raises(stretto.UsageError, match=r"_OfAll .*has a part.*(pp|tp) = "):
        stepped([_OfAll], **layout)


def test_where_ranks_hold_all_nothing_is_refused() -> None:
    stepped([*LOOK.values(), _OfAll], lambda p: p.dim() == 2, dp=2)


ELEMENTWISE: list[Make] = [
    *(
        lambda kept, kind=kind: kind(kept, lr=1e-3)
        for kind in (torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD)
    ),
    *(
        lambda kept, kind=kind: kind(kept, lr=1e-3)
        for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop, torch.optim.RMSprop)
    ),
    lambda kept: torch.optim.Adam(kept, foreach=True),
    lambda kept: torch.optim.AdamW(kept, fused=True),
    lambda kept: torch.optim.AdamW(kept, amsgrad=True, lr=torch.tensor(1e-3)),
    lambda kept: torch.optim.SGD(kept, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda kept: torch.optim.SGD([{"params": kept[:2], "lr": 0.0}, {"params": kept[2:], "lr": 0.1}]),
    lambda kept: _OfEach(kept, lambda p, grad: 1.0, 0.1),
]


def test_what_updates_each_element_is_not_refused_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(ELEMENTWISE, tp=2)


def test_a_trial_leaves_the_optimizer_and_the_generator_alone() -> None:
    model, plan = planned(tp=2)

    def work(runner: stretto.Runner) -> None:
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.0)
        runner.step(BATCH)
        before = [p.detach().clone() for p in runner.parameters()]
        optimizer.step()
        assert all(int(state["step"]) == 1 for state in optimizer.state.values())
        assert all(torch.equal(a, b) for a, b in zip(before, runner.parameters(), strict=True))

    state = torch.random.get_rng_state()
    stretto.run_threads(plan, lambda _: copy.deepcopy(model), work)
    assert torch.equal(state, torch.random.get_rng_state())


def test_what_cannot_be_tried_is_said() -> None:
    class Own(_OfEach):
        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params, lambda p, grad: 1.0, 0.1)

    with pytest.warns(UserWarning, match="Own could not be tried.*only if it updates each element"):
        stepped([lambda kept: Own(kept, 3)], tp=2)


def test_a_model_whose_runner_is_gone_is_a_plain_one() -> None:
    model, plan = planned(pp=2)
    own = copy.deepcopy(model)
    stretto.run_threads(plan, lambda _: own, lambda runner: None)
    for p in own.parameters():
        p.grad = torch.ones_like(p)
    _OfAll(own.parameters()).step()
    assert not any(torch.equal(p, q) for p, q in zip(own.parameters(), model.parameters(), strict=True))
    torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
    grads = [p.grad for p in own.parameters() if p.grad is not None]
    assert torch.nn.utils.get_total_norm(grads) == pytest.approx(1.0)
