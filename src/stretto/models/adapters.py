"""Adapters of `peft` around the modules of a model: what the model's names are without them, and how one is
made from settings.

A wrapper has the name of the module that it wraps, and that module in it (`get_base_layer`,
`original_module`). `peft` is imported when settings ask for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stretto.errors import UsageError, meant

COPIES = "modules_to_save"
"""What the copies of a module that are trained in its place are called in their wrapper."""


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a model of `peft`."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The model around which `peft` is, and how its names begin; of another itself, and no text."""
    if not is_adapted(model):
        return "", model
    base: Any = model.get_base_model()  # type: ignore[operator]
    name = next(name for name, one in model.named_modules() if one is base)
    return f"{name}.", base


def unwrapped(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name of the module that a wrapper of that name is around; of another its own."""
    of = modules[name]
    base = getattr(of, "get_base_layer", lambda: getattr(of, "original_module", None))()
    if base is None:
        return name
    return next((n for n, m in modules.items() if m is base and n.startswith(f"{name}.")), name)


def plain_names(model: nn.Module) -> dict[str, str]:
    """Name of a tensor of the model's state -> its name without adapters, whose own tensors are left out. A
    copy of a module that trains in its place has the same as that."""
    modules = dict(model.named_modules(remove_duplicate=False))
    bases = {name: base for name in modules if (base := unwrapped(modules, name)) != name}
    result: dict[str, str] = {}
    for name in model.state_dict(keep_vars=True):
        around = [wrapper for wrapper in bases if name.startswith(f"{wrapper}.")]
        if not around:
            result[name] = name
            continue
        outer = min(around, key=len)
        copies = f"{outer}.{COPIES}."
        if name.startswith(f"{bases[outer]}."):
            result[name] = outer + name.removeprefix(bases[outer])
        elif name.startswith(copies):
            result[name] = f"{outer}.{name.removeprefix(copies).partition('.')[2]}"
    return result


def peft_for(what: str) -> Any:
    """The library. what: what needs it. Raises UsageError where it is absent."""
    try:
        import peft
    except ImportError:
        raise UsageError(f"{what} needs peft: pip install 'stretto[peft]'") from None
    return peft


def adapted(model: nn.Module, settings: Mapping[str, Any], source: str, seed: int) -> nn.Module:
    """The model with a low-rank adapter, whose values are drawn from `seed`; its own parameters are frozen.

    settings: arguments of `peft.LoraConfig`. source: where the model's weights are from, for those who load
    the adapter. Parameters of the model need no values. Raises UsageError for what `peft` does not take.
    """
    peft = peft_for("model.adapter")
    for key in settings:
        if key not in peft.LoraConfig.__dataclass_fields__:
            near = meant(key, peft.LoraConfig.__dataclass_fields__, "; {}")
            raise UsageError(f"model.adapter.{key}: peft {peft.__version__} has no such setting{near}")

    def make() -> nn.Module:
        with _stand_ins(model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
            made: nn.Module = peft.get_peft_model(model, config)
            config.base_model_name_or_path = source
        return made.train()

    try:
        with ThreadPoolExecutor(1) as apart:  # a thread has no modes of a caller's
            return apart.submit(make).result()
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"model.adapter: peft cannot adapt {type(model).__name__}: {error}") from error


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[None]:
    """Parameters without values have one number each in memory while the context lasts: an adapter gets its
    values where the module is that it is around."""
    kept: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta or type(parameter) is not nn.Parameter:  # as fake ones are
                kept.append((module, key, parameter))
                number = torch.zeros((), dtype=parameter.dtype, device="cpu")
                own = nn.Parameter(number.expand(parameter.shape), requires_grad=parameter.requires_grad)
                setattr(module, key, made.setdefault(id(parameter), own))
    try:
        yield
    finally:
        for module, key, parameter in kept:
            parameter.requires_grad_(getattr(module, key).requires_grad)
            setattr(module, key, parameter)
