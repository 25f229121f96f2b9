"""Which layers of a model are equal: the same code on parameters of the same shapes; and calls of them.

Candidates are the members of a `ModuleList` or `Sequential`. Two are equal when, module by module, they have

    * the same class, with the same children under the same names, and no hooks of a user's;
    * parameters and buffers of equal shape, dtype, stride and need of a gradient, which no other module has;
    * equal attributes, and functions put in place of `forward` that close over equal things.

An attribute that is not known to be equal (the layer's index, most often) does not make two layers different,
but it is noted: `stretto.capturing.repeat` watches that the layer's code never reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

FEWEST = 4
"""Equal layers of which it pays to trace two and repeat them."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Attribute = tuple[str, str]
"""(name of the module within the layer, attribute)."""


TensorForm = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Of a tensor without elements: shape, stride, dtype and device."""


class NotRepeatedError(Exception):
    """All layers of the model have to be traced."""


@dataclass(slots=True)
class EqualLayers:
    """A group of them: their full names, and the attributes in which they may differ."""

    names: list[str]
    differing: set[Attribute]


@dataclass(slots=True)
class LayerCall:
    """A call of one of them. kind: which calls it is equal to; begin, end: its first and last segment;
    template: whether its inside was traced; outputs: of the results; grads: inputs that get a gradient."""

    layer: str
    kind: int
    begin: int
    template: bool
    inputs: list[TensorForm]
    grads: list[int]
    end: int = 0
    outputs: list[TensorForm] = field(default_factory=list)
    result: Any = None


def equal_layers(model: nn.Module) -> list[EqualLayers]:
    """The groups of equal layers, the outermost only; each has at least `FEWEST`."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    tensors = Counter(id(t) for module in model.modules() for t in _tensors(module))
    result: list[EqualLayers] = []
    searched: list[str] = []  # what the names begin with of all that is within a group's container
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not name.startswith(tuple(searched)):
            prefix = f"{name}." if name else ""
            members = {f"{prefix}{child}": member for child, member in module.named_children()}
            groups = _groups(members, places, tensors)
            result.extend(groups)
            searched += [prefix] if groups else []
    return result


def _groups(members: dict[str, nn.Module], places: Counter[int], tensors: Counter[int]) -> list[EqualLayers]:
    groups: list[tuple[nn.Module, EqualLayers]] = []
    for name, member in members.items():
        if not _is_standalone(member, places, tensors):
            continue
        for first, group in groups:
            other = differing(first, member, group.names[0], name)
            if other is not None:
                group.names.append(name)
                group.differing |= other
                break
        else:
            groups.append((member, EqualLayers([name], set())))
    return [group for _, group in groups if len(group.names) >= FEWEST]


def _is_standalone(member: nn.Module, places: Counter[int], tensors: Counter[int]) -> bool:
    """Whether no other part of the model has one of the layer's modules, parameters or buffers, and no one
    looks at what goes in and out of them."""
    own = Counter(id(t) for module in member.modules() for t in _tensors(module))
    return (
        all(places[id(module)] == 1 for module in member.modules())
        and all(tensors[key] == count for key, count in own.items())
        and not any(getattr(module, hooks) for module in member.modules() for hooks in _HOOKS)
    )


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for table in (module._parameters, module._buffers):
        yield from (tensor for tensor in table.values() if tensor is not None)


def differing(a: nn.Module, b: nn.Module, a_name: str, b_name: str) -> set[Attribute] | None:
    """The attributes in which equal layers of these names may differ; None where they are not equal."""
    ours, theirs = dict(a.named_modules()), dict(b.named_modules())
    if list(ours) != list(theirs):
        return None
    same = _Same({id(ours[name]): theirs[name] for name in ours}, a_name, b_name)
    result: set[Attribute] = set()
    for name, module in ours.items():
        other = theirs[name]
        if type(module) is not type(other) or module.__dict__.keys() != other.__dict__.keys():
            return None
        for attribute, value in module.__dict__.items():
            against = other.__dict__[attribute]
            if attribute in ("_parameters", "_buffers"):
                if not _same_tensors(value, against):
                    return None
            elif attribute != "_modules" and not same(value, against):
                if attribute == "forward" or attribute.startswith("_"):
                    return None
                result.add((name, attribute))
    return result


def _same_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    def kind(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        return tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.device

    return [(k, kind(v)) for k, v in ours.items()] == [(k, kind(v)) for k, v in theirs.items()]


@dataclass(frozen=True, slots=True)
class _Same:
    counterpart: dict[int, nn.Module]
    a_name: str
    b_name: str

    def __call__(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, nn.Module):
            counterpart: object = self.counterpart.get(id(a), a)
            return counterpart is b
        if a is b:
            return True
        if isinstance(a, str):
            return b in (a, renamed(a, self.a_name, self.b_name))
        if isinstance(a, _PLAIN):
            return bool(a == b)
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(self(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, (set, frozenset)):
            return bool(a == b) and all(isinstance(x, _PLAIN) for x in a)
        if isinstance(a, dict):
            return list(a) == list(b) and all(self(value, b[key]) for key, value in a.items())
        if isinstance(a, MethodType):
            return a.__func__ is b.__func__ and self(a.__self__, b.__self__)
        if isinstance(a, FunctionType):
            return self._same_code(a, b)
        return False

    def _same_code(self, a: FunctionType, b: FunctionType) -> bool:
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return (
            a.__code__ is b.__code__
            and a.__globals__ is b.__globals__
            and self(a.__defaults__, b.__defaults__)
            and self(a.__kwdefaults__, b.__kwdefaults__)
            and self(cells[0], cells[1])
        )


def renamed(name: str, source: str, target: str) -> str:
    """The name in layer `target` of what is called `name` in layer `source`; another name as it is."""
    within = name == source or name.startswith(f"{source}.")
    return target + name[len(source) :] if within else name
