"""A sharded model's forwards: while it is captured, its modules compute one rank's part.

1. Modules get another forward for the time of the capture: it lets communication in where the style
   says (`ops`), and then is the module's own. An input that several colwise modules read is copied or
   gathered once.
2. Attributes that count what is sharded are divided, or get the value that they have on a rank.
3. All of it is undone afterwards; the model stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.parallelize import ops
from stretto.parallelize.slices import SEQUENCE_DIM, Slices
from stretto.parallelize.split_logits import SplitLogits, full_of, gathered
from stretto.parallelize.styles import COLWISE, ROWWISE
from stretto.parallelize.tensor import AXIS, TensorParallel, full_inside, mixtures
from stretto.parallelize.unseen import functions_given, put_forward
from stretto.parallelize.vocabulary import embed


@dataclass(slots=True)
class _ShardedForward:
    """What modules share: those that gather the sequence; during one forward, inputs that were let in
    already, by identity, and where it is in slices of the sequence."""

    slices: Slices
    gathering: list[str]
    entered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@contextmanager
def sharded(model: nn.Module, how: TensorParallel) -> Iterator[None]:
    """While the context lasts, the model computes one rank's part. Parameters must already be parts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    gathering = [] if how.first is None else full_inside(how.first.rpartition(".")[0], how.modules)
    state = _ShardedForward(Slices(how), gathering)
    replaced: set[tuple[int, str]] = set()

    def begin(_module: nn.Module, _args: Any) -> None:
        state.entered.clear()
        state.slices.begin()

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        state.slices.end()

    with ExitStack() as undo:
        undo.callback(state.entered.clear)
        undo.callback(model.register_forward_pre_hook(begin, prepend=True).remove)
        undo.callback(model.register_forward_hook(end).remove)
        for name, style in how.modules.items():
            module, kind = modules[name], style.kind
            if (id(module), kind) in replaced:
                continue  # one module under two names
            replaced.add((id(module), kind))
            if kind == "attributes":
                _divide_attributes(name, module, style.attributes, how, undo)
            elif kind in COLWISE and type(module).__name__ == "Conv1D":
                parts = how.shards[f"{name}.weight" if name else "weight"].parts(how.size)
                _set(module, "nf", module.nf // parts, undo)
            if (make := _FORWARDS.get(kind)) is not None:
                undo.callback(put_forward(module, make(module, name, how, state)))
        for name, counts in how.counts.items():
            for attribute, value in counts.items():
                _set(modules[name], attribute, value, undo)
        for name, forward in _sequence(modules, how, state):
            undo.callback(put_forward(modules[name], forward))
        with functions_given(full_of):
            yield


def _divide_attributes(
    name: str, module: nn.Module, attributes: tuple[str, ...], how: TensorParallel, undo: ExitStack
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


def _set(module: nn.Module, attribute: str, value: int, undo: ExitStack) -> None:
    undo.callback(setattr, module, attribute, getattr(module, attribute))
    setattr(module, attribute, value)


def _let_in(x: Tensor, how: TensorParallel, state: _ShardedForward, sliced: bool) -> Tensor:
    """Copy or gather the input of a colwise module, once for all that read it."""
    known = state.entered.get(id(x))
    if known is not None and known[0] is x:
        return known[1]
    made = ops.gather(x, SEQUENCE_DIM, AXIS, how.size) if sliced else ops.copy(x, AXIS, how.size)
    state.entered[id(x)] = (x, made)
    return made


def _where(name: str, how: TensorParallel, state: _ShardedForward) -> tuple[bool, bool]:
    """Whether a module is inside a module that gathers the sequence, and inside one with experts."""
    around = [parent for parent in state.gathering if name.startswith(f"{parent}.")]
    return bool(around), bool(mixtures(around, how.modules))


def _sequence(
    modules: dict[str, nn.Module], how: TensorParallel, state: _ShardedForward
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The modules at which sequences are cut, gathered and put together, with their forwards, from within."""
    if how.first is None:
        return

    def gather(x: Tensor) -> Tensor:
        return _let_in(x, how, state, True)

    blocks, slices = how.first.rpartition(".")[0], state.slices
    for name, style in how.modules.items():
        if style.kind == "sequence" and name.startswith(f"{blocks}."):
            yield name, slices.norm_inside(name, modules[name])
    mixed = mixtures(state.gathering, how.modules)
    for name in state.gathering:
        inside = slices.mixture if name in mixed else partial(slices.full_inside, gather=gather)
        yield name, inside(name, modules[name])
    for name, block in modules[blocks].named_children():
        yield f"{blocks}.{name}", slices.block(f"{blocks}.{name}", block)
    for name in how.tails:
        yield name, slices.norm_after(modules[name])


def _colwise(module: nn.Module, name: str, how: TensorParallel, state: _ShardedForward) -> Callable[..., Any]:
    own, inside, mixed = module.forward, *_where(name, how, state)
    gathers = how.modules[name].kind == "colwise_gather_output"

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if inside:
            state.slices.check_inside(name)
        y = own(x if inside and not mixed else _let_in(x, how, state, False), *args, **kwargs)
        return gathered(y, AXIS, how.size) if gathers else y

    return forward


def _rowwise(module: nn.Module, name: str, how: TensorParallel, state: _ShardedForward) -> Callable[..., Any]:
    own, (_, mixed) = module.forward, _where(name, how, state)
    splits = how.modules[name].kind == "rowwise_split_input"
    scatters = how.first is not None and not mixed and name.startswith(f"{how.first.rpartition('.')[0]}.")

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if scatters:
            state.slices.check_full(name, x)
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
            y = state.slices.scatter(y)
        elif not mixed:
            y = ops.reduce(y, AXIS, how.size)
        return y if bias is None else y + bias

    return forward


def _experts(module: nn.Module, name: str, how: TensorParallel, state: _ShardedForward) -> Callable[..., Any]:
    """What it makes is a partial, and stays one: it may be added to others (of shared experts) before the
    proof of placements has the sum taken."""
    own = module.forward

    def let_in(x: Tensor) -> Tensor:
        return _let_in(x, how, state, False) if x.is_floating_point() else x

    return lambda *args, **kwargs: own(*map(let_in, args), **{key: let_in(x) for key, x in kwargs.items()})


def _vocabulary(
    module: nn.Module, name: str, how: TensorParallel, state: _ShardedForward
) -> Callable[..., Any]:
    own = module.forward
    if isinstance(module, nn.Embedding):
        return partial(embed, module, AXIS, how.size, own)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> SplitLogits:
        return SplitLogits(own(_let_in(x, how, state, False), *args, **kwargs), AXIS, how.size)

    return forward


_FORWARDS = {
    **dict.fromkeys(COLWISE, _colwise),
    **dict.fromkeys(ROWWISE, _rowwise),
    "experts": _experts,
    "vocabulary": _vocabulary,
}
