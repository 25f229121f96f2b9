"""A module of experts as one op of the step, with one for its backward, while the model is traced.

    mixture(tokens, chosen, weights, parameters, each)              the weighed results of tokens' experts
    mixture_backward(grad, tokens, chosen, weights, ..., each)      gradients of tokens, weights, parameters

parameters: their values, as the module's code reads them: adapters make other ones of them.

each: whether what a token gets does not depend on others; else experts have a capacity, which all tokens
share. So layouts see that tokens are by themselves (`stretto.ir.dims`), and nothing of how experts are
reached: `stretto.capturing.experts` puts a rank's ops in the place of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.parallelize.unseen import put_forward

ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
"""What `transformers` calls the arguments of a module of experts."""

_library: Any = torch.library.Library("stretto_experts", "DEF")  # type: ignore[no-untyped-call]
_OPERANDS = "Tensor tokens, Tensor chosen, Tensor weights, Tensor[] parameters, bool each"
_library.define(f"mixture({_OPERANDS}) -> Tensor")
_library.define(f"mixture_backward(Tensor grad, {_OPERANDS}) -> Tensor[]")


def _new(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _gradients(
    grad: Tensor, tokens: Tensor, chosen: Tensor, weights: Tensor, parameters: Sequence[Tensor], each: bool
) -> list[Tensor]:
    return [_new(x) for x in (tokens, weights, *parameters)]


_fakes: dict[str, Callable[..., Any]] = {
    "mixture": lambda tokens, *_: _new(tokens),
    "mixture_backward": _gradients,
}
for _name, _shapes in _fakes.items():
    torch.library.register_fake(f"stretto_experts::{_name}", _shapes, lib=_library)

_calls = torch.ops.stretto_experts


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, each: bool, *given: Tensor) -> Tensor:
        ctx.each = each
        ctx.save_for_backward(*given)
        made: Tensor = _calls.mixture(*given[:3], list(given[3:]), each)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tokens, chosen, weights, *parameters = ctx.saved_tensors
        made = _calls.mixture_backward(grad, tokens, chosen, weights, parameters, ctx.each)
        return None, made[0], None, *made[1:]


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Tokens (..., D), the experts that each chose and their weights; None for other arguments."""
    named: dict[str, Any] = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
    if len(args) + len(kwargs) != len(ARGUMENTS) or named.keys() != {*ARGUMENTS}:
        return None
    tokens, chosen, weights = given = tuple(named[key] for key in ARGUMENTS)
    if not all(isinstance(x, Tensor) for x in given) or chosen.shape != weights.shape:
        return None
    fits = chosen.numel() % max(tokens.shape[:-1].numel(), 1) == 0
    numbers = not chosen.is_floating_point() and weights.is_floating_point()
    return (tokens, chosen, weights) if fits and numbers else None


def _value(module: nn.Module, key: str) -> Tensor:
    """What the module's code reads as its parameter; an adapter may have parametrized it."""
    owner, _, name = key.rpartition(".")
    value: Tensor = getattr(module.get_submodule(owner), name)
    return value


@contextmanager
def as_one_op(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """While the context lasts, these modules are one op each. A call of other arguments runs the module's own
    code."""
    modules = dict(model.named_modules(remove_duplicate=False))
    with ExitStack() as undo:
        for name in dict.fromkeys(names):
            undo.callback(put_forward(modules[name], _forward(modules[name])))
        yield


def _forward(module: nn.Module) -> Callable[..., Any]:
    own, keys = module.forward, [key for key, _ in module.named_parameters()]

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = _given(args, kwargs)
        if given is None:
            return own(*args, **kwargs)
        each = getattr(module, "slots", lambda tokens: None)(1) is None
        parameters = [_value(module, key) for key in keys]
        return _Mixture.apply(each, *given, *parameters)  # type: ignore[no-untyped-call]

    return forward
