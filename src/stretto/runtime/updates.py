"""Updates as ops of a step: an optimizer of the user's takes its step over some parameters at a time.

1. An op's gradients are given to autograd as after other steps (`runtime.gradients`), so hooks act, and
       are scaled where the norm of all gradients is too large.
2. The optimizer's groups are narrowed to these parameters, it takes its step, and gets its groups back.
   One that updates each parameter by itself does not notice: its state is by parameter.
3. Gradients go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    steps = _StepsOverSome(optimizer)

    def optimize(gradients: dict[int, torch.Tensor], norm: torch.Tensor | None, most: float) -> None:
        if not updated.isdisjoint(gradients) or not updated:  # a new step
            updated.clear()
            steps.begin()
        updated.update(gradients)
        parameters = give(tensors, gradients)
        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        with uncounted():  # its states count as a rank's throughout
            meet(optimizer)
            steps.over(parameters)
        for parameter in parameters:
            parameter.grad = None

    return optimize


class _StepsOverSome:
    """An optimizer's steps over some of its parameters at a time. All of them are gone through once a step of
    the model, in `begin`: there are many, and many buckets."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.begin()

    def begin(self) -> None:
        """A step of the model begins: its groups are as they are now. What an optimizer counts in a group it
        counts once."""
        groups = self._optimizer.param_groups
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._places = {
            id(one): (number, place)
            for number, group in enumerate(groups)
            for place, one in enumerate(group["params"])
        }
        """Parameter -> its group and its place there."""

    def over(self, parameters: Sequence[nn.Parameter]) -> None:
        """The optimizer's step over these alone, in the order of their groups."""
        some: dict[int, dict[int, nn.Parameter]] = {}
        for one in parameters:
            if id(one) in self._places:
                number, place = self._places[id(one)]
                some.setdefault(number, {})[place] = one
        groups = self._optimizer.param_groups
        narrowed = [groups[number] for number in sorted(some)]
        kept = [group["params"] for group in narrowed]
        try:
            for number, group in zip(sorted(some), narrowed, strict=True):
                group["params"] = [one for _, one in sorted(some[number].items())]
                options = self._options[number]
                for key in group.keys() - options.keys() - {"params"}:
                    del group[key]
                group.update(options)
            self._optimizer.param_groups = narrowed
            if narrowed:
                self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
            for group, all_of_it in zip(narrowed, kept, strict=True):
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
        k: of_tie.setdefault(plan.job.parameters[k].kept_as, nn.Parameter(tensor))
        for k, tensor in parameters.items()
        if tensor.is_floating_point()
    }
    steps = _StepsOverSome(like(plan)([*of_tie.values()] or [nn.Parameter(torch.empty(0))]))

    def optimize(gradients: dict[int, torch.Tensor], norm: torch.Tensor | None, most: float) -> None:
        for k, gradient in gradients.items():
            kept[k].grad = gradient
        if norm is not None:
            torch.nn.utils.clip_grads_with_norm_([kept[k] for k in gradients], most, norm)
        with uncounted():
            steps.over([kept[k] for k in gradients])
        for k in gradients:
            kept[k].grad = None

    return optimize


def like(plan: Plan) -> MakeOptimizer:
    """One with as many states as the plan counts."""
    return _LIKE[plan.job.optimizer]
