"""A spread model's forwards: while it is captured, its modules compute one rank's part.

    1. Modules get another forward for the time of the capture: it lets communication in where the style
       says (`ops`), and then is the module's own. An input that several colwise modules read is copied or
       gathered once.
    2. Attributes that count what is spread are divided; those that count heads of which ranks share some get
       the value that they have on a rank.
    3. All of it is undone afterwards; the model stays as it was.

With sequence parallelism, residuals are slices of the sequence (dim 1) from the first block to the norm
after the last: the input of the first block is cut, the norm's output is collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.parallelize import ops
from stretto.parallelize.sequence import whole_inside
from stretto.parallelize.styles import COLWISE, ROWWISE
from stretto.parallelize.tensor import AXIS, TensorParallel
from stretto.parallelize.vocabulary import SplitLogits, embed

SEQUENCE_DIM = 1
"""The dim of the sequence in activations (batch, sequence, hidden)."""


@dataclass(slots=True)
class _Forward:
    """What modules share during one forward: inputs that were let in already, by identity; whether residuals
    are slices of the sequence now."""

    entered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sliced: bool = False


@contextmanager
def spread(model: nn.Module, how: TensorParallel) -> Iterator[None]:
    """While the context lasts, the model computes one rank's part. Parameters must already be parts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    state = _Forward()
    replaced: set[tuple[int, str]] = set()
    undo: list[Callable[[], None]] = []

    def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
        kept = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

        def put_back() -> None:
            module.__dict__.pop("forward")
            if kept is not None:
                module.__dict__["forward"] = kept

        undo.append(put_back)

    def begin(_module: nn.Module, _args: Any) -> None:
        state.entered.clear()
        state.sliced = False

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        if state.sliced:
            raise ValueError(
                f"sequence_parallel: the sequence was cut at {how.first}, and none of {', '.join(how.tails)} "
                "put it together again after the last block: call one of them there, or leave "
                "sequence_parallel out"
            )

    try:
        undo.append(model.register_forward_pre_hook(begin, prepend=True).remove)
        undo.append(model.register_forward_hook(end).remove)
        for name, style in how.modules.items():
            module = modules[name]
            if (id(module), style.kind) in replaced:
                continue  # one module under two names
            replaced.add((id(module), style.kind))
            if style.kind == "attributes":
                _divide_attributes(name, module, style.attributes, how, undo)
            elif style.kind in COLWISE:
                if type(module).__name__ == "Conv1D":
                    parts = how.shards[f"{name}.weight" if name else "weight"].parts(how.size)
                    _set(module, "nf", module.nf // parts, undo)
                replace(module, _colwise(module, name, how, state, style.kind == "colwise_gather_output"))
            elif style.kind in ROWWISE:
                replace(module, _rowwise(module, name, how, style.kind == "rowwise_split_input"))
            elif style.kind == "vocabulary":
                if isinstance(module, nn.Embedding):
                    replace(module, _embedding(module, how))
                else:
                    replace(module, _head(module, how, state))
        for name, counts in how.counts.items():
            for attribute, value in counts.items():
                _set(modules[name], attribute, value, undo)
        for name, copies in how.norms.items():
            replace(modules[name], _key_norm(modules[name], how, copies))
        for name in _gathering(how):
            replace(modules[name], _whole_input(modules[name], name, how, state))
        if how.first is not None:
            replace(modules[how.first], _enter(modules[how.first], how, state))
        for name in how.tails:
            replace(modules[name], _leave(modules[name], how, state))
        yield
    finally:
        for action in reversed(undo):
            action()
        state.entered.clear()


def _divide_attributes(
    name: str,
    module: nn.Module,
    attributes: tuple[str, ...],
    how: TensorParallel,
    undo: list[Callable[[], None]],
) -> None:
    for attribute in attributes:
        if attribute in how.counts.get(name, {}):
            continue  # known better than by division
        value, size = getattr(module, attribute, None), how.size
        # Of heads that several ranks share, each has one.
        shared = name in how.counts and isinstance(value, int) and 0 < value < size and size % value == 0
        if not isinstance(value, int) or (value % size and not shared):
            raise UsageError(
                f"{name}.{attribute} is {value!r}; to be divided it must be a multiple of {AXIS} = {size}"
            )
        _set(module, attribute, 1 if shared else value // size, undo)


def _set(module: nn.Module, attribute: str, value: int, undo: list[Callable[[], None]]) -> None:
    kept = getattr(module, attribute)
    setattr(module, attribute, value)
    undo.append(lambda: setattr(module, attribute, kept))


def _own(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as it stands, which may already be another than its class's."""
    forward: Callable[..., Any] = module.forward
    return forward


def _let_in(x: Tensor, how: TensorParallel, state: _Forward, sliced: bool) -> Tensor:
    """Copy or gather the input of a colwise module, once for all that read it."""
    known = state.entered.get(id(x))
    if known is not None and known[0] is x:
        return known[1]
    made = ops.gather(x, SEQUENCE_DIM, AXIS, how.size) if sliced else ops.copy(x, AXIS, how.size)
    state.entered[id(x)] = (x, made)
    return made


def _gathering(how: TensorParallel) -> list[str]:
    return [] if how.first is None else whole_inside(how.first.rpartition(".")[0], how.modules)


def _whole_input(module: nn.Module, name: str, how: TensorParallel, state: _Forward) -> Callable[..., Any]:
    own = _own(module)

    def gather(x: Tensor) -> Tensor:
        return _let_in(x, how, state, True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own(*_first_changed(args, kwargs, gather, name), **kwargs)

    return forward


def _first_changed(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], name: str
) -> tuple[Any, ...]:
    """The arguments with the activation changed: the first, or the keyword `hidden_states` (in place)."""
    if args:
        return (change(args[0]), *args[1:])
    if "hidden_states" not in kwargs:
        raise ValueError(
            f"sequence_parallel: {name} is called without a first argument and without hidden_states: give "
            "the hidden states as one of these"
        )
    kwargs["hidden_states"] = change(kwargs["hidden_states"])
    return ()


def _colwise(
    module: nn.Module, name: str, how: TensorParallel, state: _Forward, gathers: bool
) -> Callable[..., Any]:
    own, gathered = _own(module), any(name.startswith(f"{parent}.") for parent in _gathering(how))

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = own(x if gathered else _let_in(x, how, state, False), *args, **kwargs)
        return ops.collect(y, -1, AXIS, how.size) if gathers else y

    return forward


def _key_norm(module: nn.Module, how: TensorParallel, copies: int) -> Callable[..., Any]:
    """A norm of keys that ranks share. Norms compute in float32, to which they round gradients. In float64
    that is coarse, and addends are added up before; else that waits for the gradients of weights."""
    own = _own(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        fine = isinstance(made, Tensor) and made.dtype is torch.float64 and made.dim() == 4
        heads = next((dim for dim in (2, 1) if fine and made.shape[dim] == 1), None)
        return made if heads is None else ops.share(made, heads, AXIS, how.size, copies)

    return forward


def _rowwise(module: nn.Module, name: str, how: TensorParallel, splits: bool) -> Callable[..., Any]:
    own = _own(module)
    scatters = how.first is not None and name.startswith(f"{how.first.rpartition('.')[0]}.")

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if splits:
            x = ops.chunk(x, -1, AXIS, how.size)
        bias = module._parameters.get("bias")
        if bias is not None and type(module).__name__ == "Conv1D":
            weight = module._parameters["weight"]
            assert weight is not None
            y = x @ weight  # its forward always adds its bias
        elif bias is not None:
            module._parameters["bias"] = None  # added once, after the sum
            try:
                y = own(x, *args, **kwargs)
            finally:
                module._parameters["bias"] = bias
        else:
            y = own(x, *args, **kwargs)
        if scatters:
            y = ops.scatter(y, SEQUENCE_DIM, AXIS, how.size)
        else:
            y = ops.reduce(y, AXIS, how.size)
        return y if bias is None else y + bias

    return forward


def _embedding(module: nn.Embedding, how: TensorParallel) -> Callable[..., Any]:
    own = _own(module)

    def forward(tokens: Tensor) -> Tensor:
        return embed(module, own, tokens, AXIS, how.size)

    return forward


def _head(module: nn.Module, how: TensorParallel, state: _Forward) -> Callable[..., Any]:
    own = _own(module)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> SplitLogits:
        return SplitLogits(own(_let_in(x, how, state, False), *args, **kwargs), AXIS, how.size)

    return forward


def _enter(module: nn.Module, how: TensorParallel, state: _Forward) -> Callable[..., Any]:
    """The first block: its input, whole until here (positions and masks were made from it), is cut."""
    own = _own(module)

    def cut(x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise ValueError(
                f"sequence_parallel: {how.first} is given a tensor of shape {list(x.shape)}; (batch, "
                "sequence, hidden) is expected"
            )
        state.sliced = True
        return ops.chunk(x, SEQUENCE_DIM, AXIS, how.size)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if state.sliced:
            return own(*args, **kwargs)  # the first block once more
        return own(*_first_changed(args, kwargs, cut, str(how.first)), **kwargs)

    return forward


def _leave(module: nn.Module, how: TensorParallel, state: _Forward) -> Callable[..., Any]:
    """A norm beside the blocks: the first that is called after them puts the sequence together again."""
    own = _own(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        if not state.sliced:
            return found
        state.sliced = False
        return ops.collect(found, SEQUENCE_DIM, AXIS, how.size)

    return forward
