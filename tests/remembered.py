"""Traces of equal models are made once: half of the processor time of the tests was the tracing of a few.

A trace depends on the model's modules and what they have beside values, the shapes of a microbatch, the loss
and the settings (`stretto.capturing.trace`). Where all of that can be told and is the same, the first trace
serves again; where only the passes differ that are left out, what was exported before the passes serves.
Where anything cannot be reported, and in the tests of capture themselves, the model is traced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from stretto.passes import GRAPH_PASSES

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, type)
FEW = 4096
"""Elements of a tensor besides parameters and buffers whose values are compared."""

MOST = 100
"""Traces that are kept, a few hundred ops each."""

MOST_EXPORTED = 4
"""Exports that are kept, with PyTorch's graphs."""

OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}


class UntoldError(Exception):
    """Has something of which it cannot be told whether it is the same."""


def told(value: Any) -> Hashable:
    """Something equal for what makes equal traces, and for nothing else."""
    if isinstance(value, (*PLAIN, BuiltinFunctionType)):
        return (type(value), value)
    if isinstance(value, FunctionType):
        if value.__closure__ is None and "<" not in value.__qualname__:
            return value
    elif isinstance(value, functools.partial):
        return (type(value), told(value.func), told(value.args), told(value.keywords))
    elif isinstance(value, Mapping):
        return (type(value), tuple((told(key), told(one)) for key, one in value.items()))
    elif isinstance(value, (tuple, list)):
        return (type(value), tuple(map(told, value)))
    elif isinstance(value, (set, frozenset)) and all(isinstance(one, str) for one in value):
        return frozenset(value)
    elif isinstance(value, Tensor) and type(value) is Tensor and value.numel() <= FEW and not value.is_meta:
        return (value.dtype, value.shape, tuple(value.flatten().tolist()))
    elif hasattr(value, "to_json_string") and hasattr(value, "__dict__"):  # configurations of transformers
        return (type(value), value.to_json_string(), getattr(value, "_attn_implementation", None))
    elif dataclasses.is_dataclass(value):
        return (type(value), told({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}))
    raise UntoldError(type(value).__name__)


def told_of_model(model: nn.Module) -> Hashable:
    first: dict[int, str] = {}
    modules = []
    for name, module in model.named_modules(remove_duplicate=False):
        state = module.__dict__
        # Those of a state dict, which a Runner leaves on the model that it trains, are no part of a forward.
        if any(value for key, value in state.items() if "hooks" in key and "state_dict" not in key):
            raise UntoldError(f"{name} has hooks")
        beside = {key: value for key, value in state.items() if key not in OF_MODULES}
        again = first.setdefault(id(module), name)
        modules.append((name, type(module), again, told(beside)))
    tensors = []
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if type(tensor) not in (Tensor, nn.Parameter):
            raise UntoldError(f"{name} is a tensor of another kind")
        about = (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
            tensor.requires_grad,
        )
        tensors.append((name, about, first.setdefault(id(tensor), name)))
    return (tuple(modules), tuple(tensors))


def told_of_batch(batch: Any, leaves: Mapping[str, Tensor]) -> Hashable:
    """leaves: of one microbatch, without elements: a batch of more of them is traced alike."""
    given = batch if isinstance(batch, dict) else {"": batch}
    if any(type(leaf) is not Tensor for leaf in given.values()):
        raise UntoldError("a batch of another kind")
    shapes = ((x.dtype, tuple(x.shape), x.device) for x in leaves.values())
    return tuple((name, *shape) for name, shape in zip(given, shapes, strict=True))


class Kept(dict[Hashable, Any]):
    """The last `most`, by what they were made from."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def of(self, key: Hashable, make: Callable[[], Any]) -> Any:
        found = self.pop(key, None) or make()
        self[key] = found  # at the end, for the first are forgotten
        if len(self) > self.most:
            del self[next(iter(self))]
        return found


@dataclasses.dataclass
class Remembered:
    """traces: whole ones. exported: what they were made from before the passes. now: of which an export is
    made at this moment, None for one that is not kept."""

    traces: Kept = dataclasses.field(default_factory=lambda: Kept(MOST))
    exported: Kept = dataclasses.field(default_factory=lambda: Kept(MOST_EXPORTED))
    now: Hashable = None


def remembering_exports(export: Callable[..., Any], kept: Remembered) -> Callable[..., Any]:
    """`stretto.capturing.trace._exported` that exports only what is not among those kept."""

    def exported(setup: Any, repeats: bool) -> Any:
        if kept.now is None:
            return export(setup, repeats)
        return kept.exported.of(kept.now, lambda: export(setup, repeats))

    return exported


def remembering(trace: Callable[..., Any], kept: Remembered) -> Callable[..., Any]:
    """`stretto.capturing.trace._trace` that makes a trace only if it is not among those kept."""

    def traced(setup: Any, repeats: bool) -> Any:
        settings = (setup.param_dtype, setup.at, setup.absent, setup.device, setup.layout, repeats)
        try:
            if setup.meshes is not None:
                raise UntoldError("on meshes")
            leaves = told_of_batch(setup.batch, setup.leaves)
            key = (told_of_model(setup.model), leaves, told(setup.loss), told(settings))
            hash(key)
        except (UntoldError, TypeError):
            return trace(setup, repeats=repeats)

        def make() -> Any:
            kept.now = key
            try:
                return trace(setup, repeats=repeats)
            finally:
                kept.now = None

        return kept.traces.of((key, tuple(setup.skip_passes), tuple(GRAPH_PASSES)), make)

    return traced
