"""The optimizer over one rank's parameters, by its name in PyTorch, and its learning rate as a pure function
of the step: resuming needs no state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.config import LRScheduleSettings, OptimizerSettings
from stretto.errors import UsageError, meant
from stretto.ir.parameters import STATES, OptimizerKind

SETTINGS = ("betas", "eps", "weight_decay")
"""Arguments that are settings of their own, where the class has them."""


def make_optimizer(parameters: Sequence[nn.Parameter], settings: OptimizerSettings) -> Optimizer:
    """The optimizer with decay on matrices only: a decayed norm's gain or bias would be pulled away from what
    the norm needs (as GPT-2's and Llama's recipes leave them out). Raises UsageError as `state_of`."""
    made, options = _class_of(settings)
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    decay = options.pop("weight_decay", None)
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors}]
    if decay is not None:
        groups[0]["weight_decay"], groups[1]["weight_decay"] = decay, 0.0
    try:
        return made([group for group in groups if group["params"]], lr=settings.lr, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(settings, error) from None


def state_of(settings: OptimizerSettings) -> OptimizerKind:
    """Whose state memory is counted for. Raises UsageError as `states_after_a_step`."""
    state = states_after_a_step(settings)[0].values()
    tensors = sum(isinstance(one, torch.Tensor) and one.shape == (4, 4) for one in state)
    return next((kind for kind, count in STATES.items() if count == tensors), "adamw")


def states_after_a_step(settings: OptimizerSettings) -> list[dict[str, Any]]:
    """What one step of a small matrix and a small vector leaves of each. Raises UsageError for a class or
    options that PyTorch does not have, and for an optimizer that cannot take such a step."""
    small = [nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,))]
    optimizer = make_optimizer(small, settings)
    for one in small:
        one.grad = torch.ones_like(one)
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(settings, error) from None
    return [optimizer.state[one] for one in small]


def _refused(settings: OptimizerSettings, error: Exception) -> UsageError:
    given = f" with {settings.options}" if settings.options else ""
    return UsageError(
        f"optimizer.name = {settings.name!r}{given} is refused by PyTorch ({str(error).splitlines()[0]}): "
        "change optimizer.options, or take another optimizer, such as AdamW or SGD"
    )


def _class_of(settings: OptimizerSettings) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    """The class and its arguments, but for parameters and rate. Raises UsageError."""
    known = {
        name: one
        for name, one in vars(torch.optim).items()
        if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer
    }
    made = known.get(settings.name)
    if made is None:
        names = meant(settings.name, known) or f"known are {', '.join(sorted(known))} "
        raise UsageError(f"optimizer.name = {settings.name!r} is not in torch.optim: {names.strip()}")
    arguments: Mapping[str, inspect.Parameter] = inspect.signature(made).parameters
    free = [name for name in arguments if name not in ("params", "lr", *SETTINGS)]
    for key in settings.options:
        if key not in free:
            near = meant(key, free).strip() or f"known are {', '.join(free)}"
            why = f"it is the setting optimizer.{key}" if key in ("lr", *SETTINGS) else near
            raise UsageError(f"optimizer.options.{key}: {settings.name} has no such option; {why}")
    options: dict[str, Any] = {"fused": True} if made is torch.optim.AdamW else {}
    for key in SETTINGS:
        # The defaults are AdamW's: another class has its own, where settings give none.
        if made is not torch.optim.AdamW and key not in settings.model_fields_set:
            continue
        value = getattr(settings, key)
        # Adafactor's eps are two.
        if key in arguments and isinstance(arguments[key].default, tuple) == isinstance(value, tuple):
            options[key] = value
        else:
            raise UsageError(f"optimizer.{key} = {value}: {settings.name} does not take it; drop it")
    return made, {**options, **settings.options}


def learning_rate(schedule: LRScheduleSettings, peak: float, steps: int, step: int) -> float:
    """The rate of step `step` (from 0) of `steps`; `peak` is the highest.

    It rises linearly over `warmup_steps`, the last of which has the highest rate, and then follows a half
    cosine (Loshchilov and Hutter, SGDR, 2017) or a line to `min_lr_ratio * peak` at the last step, or
    stays, or stays until a line over the last `decay_steps` (Hu et al., MiniCPM, 2024, "wsd"). Steps beyond
    the last keep its rate.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    first, way = schedule.warmup_steps, steps - 1 - schedule.warmup_steps
    if schedule.kind == "wsd":
        way = min(schedule.decay_steps, way)
        first = steps - 1 - way
    done = min(1.0, max(0, step - first) / way) if way > 0 else 1.0
    left = (1.0 + math.cos(math.pi * done)) / 2.0 if schedule.kind == "cosine" else 1.0 - done
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * left)
