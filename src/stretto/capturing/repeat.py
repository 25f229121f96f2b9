"""Equal layers are traced twice, and stand as one op from then on.

The model's own code runs through all of its layers; only what happens inside an equal layer is not traced
again (`stretto.capturing.expand` puts it there afterwards). What is done to a call of such a layer:

    1. Calls are of one kind when their layers are equal (`stretto.capturing.equal`) and their arguments are:
       tensors of the same shape, dtype, stride, need of a gradient and, where they are known, value; all else
       equal.
    2. The first two calls of a kind run, between marks: `enter` for each tensor that goes in and `leave` for
       each that comes out, with `enter_grad` and `leave_grad` in the backward.
    3. Every later call becomes one op, `layer`, and `layer_grad` in the backward.

A layer is thereby taken to be a function of its arguments, parameters, buffers and attributes. Whatever can
be seen to be otherwise raises `NotRepeatedError`, upon which the whole is traced: a layer that reads an
attribute in which it may differ from the others (its index), that writes to an attribute, to a buffer or to
an argument, or returns what needs no gradient.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from stretto.capturing.equal import Group, equal_layers, renamed
from stretto.capturing.known import Known
from stretto.parallelize.functions import put_forward

NAMESPACE = "stretto_layers"
MARKS = ("enter", "leave", "enter_grad", "leave_grad")

TEMPLATES = 2
"""Calls of a kind that are traced: one to repeat, and one to see that it is repeated rightly."""

Spec = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class NotRepeatedError(Exception):
    """The model has to be traced as a whole."""


class Segments(Protocol):
    """What is needed of the numbering of segments (`torch_adapter`)."""

    names: list[str]

    def follow(self, names: list[str]) -> None: ...


@dataclass(slots=True)
class Call:
    """A call of an equal layer. kind: which calls it is equal to; begin, end: its first and last segment;
    template: whether its inside was traced; outputs: of the results; grads: inputs that get a gradient."""

    layer: str
    kind: int
    begin: int
    template: bool
    inputs: list[Spec]
    grads: list[int]
    end: int = 0
    outputs: list[Spec] = field(default_factory=list)
    result: Any = None


_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _name in MARKS:
    _library.define(f"{_name}(Tensor x, int call, int at) -> Tensor")
_library.define("layer(Tensor[] inputs, int call) -> Tensor[]")
_library.define("layer_grad(Tensor[] grads, int call, int[] which) -> Tensor[]")

_calls = getattr(torch.ops, NAMESPACE)
_tracing: list[Call] = []
"""The calls of the trace that is under way: ops can be given numbers only."""


def _spec(x: Tensor) -> Spec:
    return x.shape, x.stride(), x.dtype, x.device


def _new(spec: Spec) -> Tensor:
    shape, stride, dtype, device = spec
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _same(x: Tensor, call: int, at: int) -> Tensor:
    return _new(_spec(x))


def _layer(inputs: list[Tensor], call: int) -> list[Tensor]:
    return [_new(spec) for spec in _tracing[call].outputs]


def _layer_grad(grads: list[Tensor], call: int, which: list[int]) -> list[Tensor]:
    return [_new(_tracing[call].inputs[at]) for at in _tracing[call].grads]


_fakes: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(MARKS, _same),
    "layer": _layer,
    "layer_grad": _layer_grad,
}
for _name, _shapes in _fakes.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shapes, lib=_library)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, word: str, call: int, at: int) -> Any:
        ctx.set_materialize_grads(False)
        ctx.word, ctx.call, ctx.at = word, call, at
        return getattr(_calls, word)(x, call, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        return getattr(_calls, f"{ctx.word}_grad")(grad, ctx.call, ctx.at), None, None, None


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: int, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(_calls.layer(list(inputs), call))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call = _tracing[ctx.call]
        which = [at for at, grad in enumerate(grads) if grad is not None]
        found: list[Tensor | None] = [None] * len(call.inputs)
        if which:
            made = _calls.layer_grad([grad for grad in grads if grad is not None], ctx.call, which)
            for at, grad in zip(call.grads, made, strict=True):
                found[at] = grad
        return (None, *found)


_one_at_a_time = threading.RLock()
"""Classes are changed, and calls numbered, for one trace at a time."""


class Layers:
    """The equal layers of a model while it is traced."""

    def __init__(self, model: nn.Module, groups: list[Group]) -> None:
        self.calls: list[Call] = []
        self._modules = dict(model.named_modules())
        self._groups = groups
        self._segments: Segments | None = None
        self._known = Known()
        self._kinds: dict[Any, int] = {}
        self._traced: dict[int, int] = {}
        self._watched: set[int] = set()
        self._kept: list[Any] = []

    def begin(self, segments: Segments, known: Known) -> None:
        """Before each run of the forward (the exporter runs it twice). known: what is known of its
        tensors."""
        self._segments = segments
        self._known = known
        self._kinds.clear()
        self._traced.clear()
        self._watched.clear()
        self._kept.clear()
        self.calls.clear()
        _tracing.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the context lasts, calls of equal layers are looked at."""
        with _one_at_a_time, ExitStack() as undo:
            for at, group in enumerate(self._groups):
                for name in group.names:
                    self._install(at, name, undo)
                self._watch(group, undo)
            try:
                yield
            finally:
                _tracing.clear()

    def _install(self, group: int, name: str, undo: ExitStack) -> None:
        own = self._modules[name].forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._called(group, name, own, args, kwargs)

        undo.callback(put_forward(self._modules[name], forward))

    def _watch(self, group: Group, undo: ExitStack) -> None:
        """Note reads of the attributes in which layers may differ, by properties of their classes."""
        for within, attribute in group.differing:
            kind = type(self._modules[f"{group.names[0]}.{within}" if within else group.names[0]])
            if isinstance(kind.__dict__.get(attribute), _Watched):
                continue
            if hasattr(inspect.getattr_static(kind, attribute, None), "__set__"):
                raise NotRepeatedError(f"{kind.__name__}.{attribute} is a property")
            if attribute in kind.__dict__:
                kept = kind.__dict__[attribute]
                undo.callback(setattr, kind, attribute, kept)
            else:
                undo.callback(delattr, kind, attribute)
            setattr(kind, attribute, _Watched(attribute, self._watched))

    def _called(
        self, group: int, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert self._segments is not None
        if self._watched:
            return own(*args, **kwargs)  # a layer that another calls is a part of that
        if any(call.layer == name for call in self.calls):
            raise NotRepeatedError(f"{name} is called twice: its gradients are sums")
        tensors: list[Tensor] = []
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        given_as = _structure((args, kwargs), tensors, self._kept)
        key = group, state, given_as, tuple(map(self._known.number, tensors))
        kind = self._kinds.setdefault(key, len(self._kinds))
        grads = [at for at, x in enumerate(tensors) if x.requires_grad and torch.is_grad_enabled()]
        begin = len(self._segments.names) - 1
        seen = self._traced.get(kind)
        template = sum(call.kind == kind and call.template for call in self.calls) < TEMPLATES
        call = Call(name, kind, begin, template, [_spec(x) for x in tensors], grads)
        number = len(self.calls)
        self.calls.append(call)
        _tracing.append(call)
        if not template:
            assert seen is not None
            return self._stand_in(number, self.calls[seen], tensors)
        self._traced[kind] = number
        entered = [_marked(x, "enter", number, at) for at, x in enumerate(tensors)]
        for x, before in zip(entered, tensors, strict=True):
            self._known.same(x, before)
        given, named = _replaced((args, kwargs), iter(entered))
        made = self._observed(name, own, given, named, entered)
        call.end = len(self._segments.names) - 1
        results: list[Tensor] = []
        others: list[Any] = []
        _structure(made, results, others)
        if others or not all(x.requires_grad for x in results):
            raise NotRepeatedError(f"{name} returns more than tensors with a gradient")
        call.outputs = [_spec(x) for x in results]
        left = [_marked(x, "leave", number, at) for at, x in enumerate(results)]
        call.result = made
        return _replaced(made, iter(left))

    def _observed(
        self, name: str, own: Callable[..., Any], args: Any, kwargs: Any, entered: list[Tensor]
    ) -> Any:
        """Run a layer and see that it does no more than to compute."""
        modules = list(self._modules[name].modules())
        before = [dict(module.__dict__) for module in modules]
        versions = [x._version for x in entered]
        self._watched.update(map(id, modules))
        try:
            made = own(*args, **kwargs)
        finally:
            self._watched.clear()
        if not all(_unchanged(kept, module) for kept, module in zip(before, modules, strict=True)):
            raise NotRepeatedError(f"{name} writes to an attribute")
        if versions != [x._version for x in entered]:
            raise NotRepeatedError(f"{name} writes to what it is given")
        return made

    def _stand_in(self, number: int, like: Call, tensors: list[Tensor]) -> Any:
        assert self._segments is not None
        call = self.calls[number]
        call.outputs, call.result = like.outputs, like.result
        made = _StandIn.apply(number, *tensors)  # type: ignore[no-untyped-call]
        inside = self._segments.names[like.begin + 1 : like.end + 1]
        self._segments.follow([renamed(name, like.layer, call.layer) for name in inside])
        call.end = len(self._segments.names) - 1
        return _replaced(call.result, iter(made))


class _Watched:
    """An attribute of a class that tells when a watched instance's is read."""

    def __init__(self, name: str, watched: set[int]) -> None:
        self._name = name
        self._ids = watched

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if id(instance) in self._ids:
            raise NotRepeatedError(f"{owner.__name__} reads {self._name}, in which layers may differ")
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value

    def __delete__(self, instance: Any) -> None:
        del instance.__dict__[self._name]


def layers_of(model: nn.Module) -> Layers | None:
    """The model's equal layers; None when it has none."""
    groups = equal_layers(model)
    return Layers(model, groups) if groups else None


def _unchanged(kept: dict[str, Any], module: nn.Module) -> bool:
    now = module.__dict__
    return kept.keys() == now.keys() and all(value is now[key] for key, value in kept.items())


def _marked(x: Tensor, word: str, call: int, at: int) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        return _Mark.apply(x, word, call, at)  # type: ignore[no-any-return, no-untyped-call]
    made: Tensor = getattr(_calls, word)(x, call, at)
    return made


def _structure(value: Any, tensors: list[Tensor], others: list[Any]) -> Any:
    """What distinguishes two values beside the elements of tensors, hashable. Appends the tensors, and what
    is known by its identity alone (which must not pass to another object meanwhile)."""
    if isinstance(value, Tensor):
        first = next((at for at, x in enumerate(tensors) if x is value), len(tensors))
        tensors.append(value)
        return "tensor", first, _spec(value), value.requires_grad, type(value)
    if type(value) in (tuple, list):
        return type(value), tuple(_structure(item, tensors, others) for item in value)
    if type(value) is dict:
        return dict, tuple((key, _structure(item, tensors, others)) for key, item in value.items())
    if value is None or type(value) in (bool, int, float, str):
        return type(value), value
    others.append(value)
    return "object", id(value)


def _replaced(value: Any, parts: Iterator[Any]) -> Any:
    """The value with other things in the places of tensors, in the order of `_structure`."""
    if isinstance(value, Tensor):
        return next(parts)
    if type(value) in (tuple, list):
        return type(value)(_replaced(item, parts) for item in value)
    if type(value) is dict:
        return {key: _replaced(item, parts) for key, item in value.items()}
    return value
