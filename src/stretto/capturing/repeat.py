"""Equal layers are traced twice, and every later call of one is one op (`stretto.capturing.expand`).

    1. Calls are of one kind when their layers are equal (`stretto.capturing.equal`) and their arguments are:
       tensors of the same form, need of a gradient and, where they are known, value; all else equal.
    2. The first two calls of a kind run, between marks: `enter` for each tensor that goes in and `leave` for
       each that comes out, with `enter_grad` and `leave_grad` in the backward.
    3. Every later call becomes one op, `layer`, and `layer_grad` in the backward.

What can be seen to be no function of arguments, parameters, buffers and attributes raises `NotRepeatedError`:
a layer that reads an attribute in which it may differ from the others (its index), that writes to an
attribute, to a buffer or to an argument, or returns what needs no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.capturing.calls_adapter import tree_flatten, tree_unflatten
from stretto.capturing.equal import (
    EqualLayers,
    LayerCall,
    NotRepeatedError,
    TensorForm,
    equal_layers,
    renamed,
)
from stretto.capturing.known import Known
from stretto.capturing.read import Reads
from stretto.parallelize.unseen import put_forward

NAMESPACE = "stretto_layers"
MARKS = ("enter", "leave", "enter_grad", "leave_grad")

_PLAIN = (bool, int, float, str, type(None))

TEMPLATES = 2
"""Calls of a kind that are traced: one to repeat, and one to see that it is repeated rightly."""


_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _name in MARKS:
    _library.define(f"{_name}(Tensor x, int call, int at) -> Tensor")
_library.define("layer(Tensor[] inputs, int call) -> Tensor[]")
_library.define("layer_grad(Tensor[] grads, int call, int[] which) -> Tensor[]")

_calls = getattr(torch.ops, NAMESPACE)
_tracing: list[LayerCall] = []
"""The calls of the trace that is under way: ops can be given numbers only."""


def _form(x: Tensor) -> TensorForm:
    return x.shape, x.stride(), x.dtype, x.device


def _new(form: TensorForm) -> Tensor:
    shape, stride, dtype, device = form
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


_fakes: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(MARKS, lambda x, call, at: _new(_form(x))),
    "layer": lambda inputs, call: [_new(form) for form in _tracing[call].outputs],
    "layer_grad": lambda grads, call, which: [_new(_tracing[call].inputs[at]) for at in _tracing[call].grads],
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


class _Substitute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: int, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(_calls.layer(list(inputs), call))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call = _tracing[ctx.call]
        which = [at for at, grad in enumerate(grads) if grad is not None]
        result: list[Tensor | None] = [None] * len(call.inputs)
        if which:
            made = _calls.layer_grad([grad for grad in grads if grad is not None], ctx.call, which)
            for at, grad in zip(call.grads, made, strict=True):
                result[at] = grad
        return (None, *result)


class Layers:
    """The equal layers of a model while it is traced."""

    def __init__(self, model: nn.Module, groups: list[EqualLayers]) -> None:
        self.calls: list[LayerCall] = []
        self._modules = dict(model.named_modules())
        self._groups = groups
        self._segments: Any = None
        self._known = Known()
        self._kinds: dict[Any, int] = {}
        self._traced: dict[int, int] = {}
        self._running = False
        self._kept: list[Any] = []

    def begin(self, segments: Any, known: Known, reads: Reads | None = None) -> None:
        """Before each run of the forward (the exporter runs it twice). segments: numbers them
        (`torch_adapter`); known: what is known of its tensors; reads: notes the attributes that it reads."""
        self._segments = segments
        self._known = known
        self._reads = reads
        self._kinds.clear()
        self._traced.clear()
        self._kept.clear()
        self.calls.clear()
        _tracing.clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the context lasts, calls of equal layers are looked at."""
        with ExitStack() as undo:
            for at, group in enumerate(self._groups):
                for name in group.names:
                    module = self._modules[name]
                    undo.callback(put_forward(module, partial(self._called, at, name, module.forward)))
            try:
                yield
            finally:
                _tracing.clear()

    def _called(self, group: int, name: str, own: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._running:
            return own(*args, **kwargs)  # a layer that another calls is a part of that
        if any(call.layer == name for call in self.calls):
            raise NotRepeatedError(f"{name} is called twice: its gradients are sums")
        leaves, form = tree_flatten((args, kwargs))
        tensors = _tensors_of(leaves)
        state = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        given_as = repr(form), tuple(_key(leaf, tensors, self._kept) for leaf in leaves)
        key = group, state, given_as, tuple(map(self._known.number, tensors))
        kind = self._kinds.setdefault(key, len(self._kinds))
        grads = [at for at, x in enumerate(tensors) if x.requires_grad and torch.is_grad_enabled()]
        begin = len(self._segments.names) - 1
        seen = self._traced.get(kind)
        template = sum(call.kind == kind and call.template for call in self.calls) < TEMPLATES
        call = LayerCall(name, kind, begin, template, [_form(x) for x in tensors], grads)
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
        given, named = _replaced(leaves, form, entered)
        made = self._observed(name, group, own, given, named, entered)
        call.end = len(self._segments.names) - 1
        call.result = results, made_as = tree_flatten(made)
        plain = all(x.requires_grad if isinstance(x, Tensor) else isinstance(x, _PLAIN) for x in results)
        if not plain:
            raise NotRepeatedError(f"{name} returns more than tensors with a gradient")
        call.outputs = [_form(x) for x in _tensors_of(results)]
        left = [_marked(x, "leave", number, at) for at, x in enumerate(_tensors_of(results))]
        return _replaced(results, made_as, left)

    def _observed(
        self, name: str, group: int, own: Callable[..., Any], args: Any, kwargs: Any, entered: list[Tensor]
    ) -> Any:
        modules = dict(self._modules[name].named_modules())
        before = [dict(module.__dict__) for module in modules.values()]
        versions = [x._version for x in entered]
        self._running = True
        try:
            apart: AbstractContextManager[set[tuple[int, str]]] = nullcontext(set())
            if self._reads is not None:
                apart = self._reads.apart()
            with apart as read:
                made = own(*args, **kwargs)
        finally:
            self._running = False
        for within, attribute in self._groups[group].differing:
            if (id(modules[within]), attribute) in read:
                raise NotRepeatedError(f"{name} reads {attribute}, in which layers may differ")
        if not all(_unchanged(kept, module) for kept, module in zip(before, modules.values(), strict=True)):
            raise NotRepeatedError(f"{name} writes to an attribute")
        if versions != [x._version for x in entered]:
            raise NotRepeatedError(f"{name} writes to its arguments")
        return made

    def _stand_in(self, number: int, like: LayerCall, tensors: list[Tensor]) -> Any:
        call = self.calls[number]
        call.outputs, call.result = like.outputs, like.result
        made = _Substitute.apply(number, *tensors)  # type: ignore[no-untyped-call]
        inside = self._segments.names[like.begin + 1 : like.end + 1]
        self._segments.follow([renamed(name, like.layer, call.layer) for name in inside])
        call.end = len(self._segments.names) - 1
        leaves, form = call.result
        return _replaced(leaves, form, made)


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


def _key(leaf: Any, tensors: Sequence[Tensor], kept: list[Any]) -> Any:
    """What distinguishes an argument from others besides tensors' elements, hashable. kept: gets what is
    known by its identity alone, which must not pass to another object meanwhile."""
    if isinstance(leaf, Tensor):
        first = next(at for at, x in enumerate(tensors) if x is leaf)
        return "tensor", first, _form(leaf), leaf.requires_grad, type(leaf)
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    kept.append(leaf)
    return "object", id(leaf)


def _replaced(leaves: Sequence[Any], form: Any, tensors: Sequence[Tensor]) -> Any:
    others = iter(tensors)
    return tree_unflatten([next(others) if isinstance(x, Tensor) else x for x in leaves], form)


def _tensors_of(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
