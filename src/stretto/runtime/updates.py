"""Updates as ops of a step: an optimizer of the user's takes its step over some parameters at a time.

1. An op's gradients are given to autograd as after other steps (`runtime.gradients`), so hooks act, and
       are scaled where the norm of all gradients is too large.
2. The optimizer's groups are narrowed to these parameters, it takes its step, and gets its groups back.
   One that updates each parameter by itself does not notice: its state is by parameter.
3. Gradients go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.errors import UsageError
from stretto.ir.parameters import OptimizerKind
from stretto.ir.plan import Plan
from stretto.runtime.gradients import give
from stretto.runtime.optimizer_trial import meet
from stretto.runtime.rank_tensors import RankTensors
from stretto.tensor.dtensor_adapter import outside_modes as uncounted

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""Parameters -> an optimizer over them."""

Optimize = Callable[[dict[int, torch.Tensor], torch.Tensor | None, float], None]
"""`RankState.optimize`."""


def optimizer_of(
    plan: Plan, make: MakeOptimizer | None, parameters: list[nn.Parameter], cuda_graph: bool
) -> Optimizer | None:
    """The optimizer of a plan with updates; None for one without. Raises UsageError where a plan with updates
    has none, or another plan has one."""
    if make is None and plan.job.updates:
        raise UsageError(
            "the plan updates parameters, and the Runner has no optimizer for it: give one, such as "
            "Runner(plan, model, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)), or "
            "capture without updates=True and call your optimizer's step()"
        )
    if make is None:
        return None
    if not plan.job.updates:
        raise UsageError(
            "the plan updates no parameters, and optimizer= is for one that does: capture with "
            "Parallel(updates=True), or make the optimizer over runner.parameters() and call its step()"
        )
    if cuda_graph:
        raise UsageError(
            "cuda_graph=True replays what was recorded, and an optimizer's step on the host is not: capture "
            "without updates=True, or leave cuda_graph out"
        )
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise UsageError(
            f"optimizer= takes parameters and gives a torch.optim.Optimizer over them; it gave a "
            f"{type(made).__name__}"
        )
    return made


def optimize_by(optimizer: Optimizer, tensors: RankTensors) -> Optimize:
    """How a plan's updates are done."""

    updated: set[int] = set()
    options: list[dict[str, Any]] = []

    def optimize(gradients: dict[int, torch.Tensor], norm: torch.Tensor | None, most: float) -> None:
        if not updated.isdisjoint(gradients) or not updated:  # a new step
            updated.clear()
            options[:] = [_options(group) for group in optimizer.param_groups]
        updated.update(gradients)
        parameters = give(tensors, gradients)
        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        with uncounted():  # its states count as a rank's throughout
            meet(optimizer)
            step_over(optimizer, parameters, options)
        for parameter in parameters:
            parameter.grad = None

    return optimize


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def step_over(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], options: Sequence[Mapping[str, Any]] = ()
) -> None:
    """The optimizer's step over these of its parameters alone. options: of its groups, as they were before
    the step: what an optimizer counts in a group it counts once."""
    own = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    kept = [group["params"] for group in groups]
    narrowed = [[one for one in of_group if id(one) in own] for of_group in kept]
    try:
        for at, (group, some) in enumerate(zip(groups, narrowed, strict=True)):
            group["params"] = some
            if some and options:
                for key in group.keys() - options[at].keys() - {"params"}:
                    del group[key]
                group.update(options[at])
        optimizer.param_groups = [group for group, some in zip(groups, narrowed, strict=True) if some]
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = groups
        for group, all_of_it in zip(groups, kept, strict=True):
            group["params"] = all_of_it


_LIKE: Mapping[OptimizerKind, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
}


def made_up_optimize(plan: Plan, parameters: Mapping[int, torch.Tensor]) -> Optimize:
    """Updates by an optimizer that has as many states as the plan counts, of tensors that no model has."""
    of_tie: dict[str, nn.Parameter] = {}
    kept = {
        k: of_tie.setdefault(plan.job.parameters[k].tied_to, nn.Parameter(tensor))
        for k, tensor in parameters.items()
        if tensor.is_floating_point()
    }
    optimizer = like(plan)([*of_tie.values()] or [nn.Parameter(torch.empty(0))])

    def optimize(gradients: dict[int, torch.Tensor], norm: torch.Tensor | None, most: float) -> None:
        for k, gradient in gradients.items():
            kept[k].grad = gradient
        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_([kept[k] for k in gradients], most, norm)
        with uncounted():
            step_over(optimizer, [kept[k] for k in gradients])
        for k in gradients:
            kept[k].grad = None

    return optimize


def like(plan: Plan) -> MakeOptimizer:
    """One with as many states as the plan counts."""
    return _LIKE[plan.job.optimizer]
