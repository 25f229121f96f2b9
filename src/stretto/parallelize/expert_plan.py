"""Which modules of a model have experts: by its own plan, or by one that is given.

A plan is pattern of module names -> "experts". Looks at names and shapes; changes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from stretto.errors import UsageError
from stretto.parallelize.styles import named_by, no_module

STYLE = "experts"
OF_PARAMETERS = "grouped_gemm"
"""The style of experts' parameters in plans of `transformers`; that of their module has changed its name."""


def ep_plan_of(model: nn.Module) -> Mapping[str, str]:
    """The model's own plan, pattern -> style: its attribute `ep_plan`, which models of `transformers` have
    too, in newer versions; in 5.17 the config of their base model says it."""
    own = _of_module(model) or _of_config(model)
    result: dict[str, str] = {}
    for pattern, style in own.items():
        if style == OF_PARAMETERS:
            result[pattern.rpartition(".")[0]] = STYLE
        elif style == STYLE:
            result[pattern] = STYLE
    return result


def _of_module(model: nn.Module) -> Mapping[str, str]:
    """The plan of the first module that has one, with that module's name: a wrapper (as of `peft`) gives the
    attributes of what it wraps, and has other names."""
    for name, module in model.named_modules():
        if inspect.getattr_static(module, "ep_plan", None) is not None and module.ep_plan:
            plan: Any = module.ep_plan
            return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}
    return {}


def experts_apart(model: nn.Module) -> str | None:
    """The name of the first list of experts' modules, as `transformers` 4 has them; None for no such list."""
    lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return next((name for name in lists if name.rpartition(".")[2] == "experts"), None)


def check_not_adapted(modules: Mapping[str, nn.Module], name: str) -> None:
    """Raises UsageError for experts whose parameters an adapter around them changes, as `peft`'s for
    `target_parameters`: it computes a change of all experts, and a rank has a part of them."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        around = modules[".".join(parts[:end])]
        parameter = getattr(around, "parameter_name", None)
        if isinstance(parameter, str) and hasattr(around, "get_delta_weight"):
            raise UsageError(
                f"{'.'.join(parts[:end])} ({type(around).__name__}) adapts {parameter!r} of all "
                "experts at once, and expert-parallel ranks have a part of them: adapt modules instead "
                "(target_modules), or give ep = 1 and use pp or dp"
            )


def of_modules(model: nn.Module, name: str) -> str:
    """Why such a list cannot be shared, and what to do."""
    return (
        f"{type(model).__name__} has each expert of {name} in a module of its own, and ranks share experts "
        "along dim 0 of parameters that have all of a layer's: take transformers 5.17 or newer, which has "
        "them so, or give ep = 1"
    )


def _of_config(model: nn.Module) -> Mapping[str, str]:
    """The plan that a config of `transformers` has for the base model, with the base model's name."""
    plan = getattr(getattr(model, "config", None), "base_model_ep_plan", None) or {}
    base = getattr(model, "base_model", model)
    name = next((name for name, module in model.named_modules() if module is base), "")
    return {f"{name}.{pattern}" if name else pattern: style for pattern, style in plan.items()}


def experts_in(model: nn.Module, plan: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The names of the modules that have experts, by the plan or the model's own. Raises UsageError for a
    plan that does not fit the model."""
    names = [name for name, _ in model.named_modules()]
    if plan is None:
        return tuple(result for pattern in ep_plan_of(model) for result in named_by(pattern, names))
    modules = dict(model.named_modules(remove_duplicate=False))
    given: dict[str, None] = {}
    for pattern, style in plan.items():
        where = f"ep_plan[{pattern!r}]"
        if style != STYLE:
            raise UsageError(f"{where}: unknown style {style!r}; the one that there is: {STYLE!r}")
        result = named_by(pattern, modules)
        if not result:
            raise UsageError(f"{where}: {no_module(pattern, modules)}")
        for name in result:
            if not any(p.dim() > 1 for p in modules[name].parameters(recurse=False)):
                check_not_adapted(modules, name)
                if isinstance(modules[name], nn.ModuleList):
                    raise UsageError(f"{where}: {of_modules(model, name)}")
                raise UsageError(
                    f"{where}: {name} has no parameters of its own whose dim 0 could be the expert: name the "
                    "module that has such, or leave the pattern out"
                )
        given |= dict.fromkeys(result)
    return tuple(given)
