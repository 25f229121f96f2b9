"""Which modules of a model hold experts: by its own plan, or by one that is given.

A plan is pattern of module names -> "experts". Looks at names and shapes; changes nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from torch import nn

from stretto.errors import UsageError
from stretto.parallelize.styles import named_by

STYLE = "experts"
THEIR_STYLE = "ep_dispatch_experts"
"""What `transformers` (5) calls it; it names the modules' parameters as well, which follow from these."""


def ep_plan_of(model: nn.Module) -> Mapping[str, str]:
    """The model's own plan, pattern -> style: its attribute `ep_plan`, which models of `transformers` have
    too."""
    own = getattr(model, "ep_plan", None) or {}
    return {pattern: STYLE for pattern, style in own.items() if style in (STYLE, THEIR_STYLE)}


def experts_in(model: nn.Module, plan: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The names of the modules that hold experts, by the plan or the model's own. Raises UsageError for a
    plan that does not fit the model."""
    names = [name for name, _ in model.named_modules()]
    if plan is None:
        return tuple(found for pattern in ep_plan_of(model) for found in named_by(pattern, names))
    modules = dict(model.named_modules(remove_duplicate=False))
    given: dict[str, None] = {}
    for pattern, style in plan.items():
        where = f"ep_plan[{pattern!r}]"
        if style != STYLE:
            raise UsageError(f"{where}: unknown style {style!r}; the one that there is: {STYLE!r}")
        found = named_by(pattern, modules)
        if not found:
            near = difflib.get_close_matches(pattern, {_pattern(name) for name in modules}, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"{where}: the model has no module of that name{hint}")
        for name in found:
            if not any(p.dim() > 1 for p in modules[name].parameters(recurse=False)):
                raise UsageError(
                    f"{where}: {name} has no parameters of its own whose dim 0 could be the expert: name the "
                    "module that holds such, or leave the pattern out"
                )
        given |= dict.fromkeys(found)
    return tuple(given)


def _pattern(name: str) -> str:
    """The pattern that names a module in all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
