"""Tensor and sequence parallelism: a model's modules made to compute one rank's part, while it is captured.

    1. The plan says which modules are spread (`styles`). What it leaves out for sequence parallelism is
       found: the blocks, and the norms in and after them.
    2. Parameters of spread modules become shards: rows, columns, or parts of packed columns.
    3. Modules get another forward for the time of the capture: it lets communication in where the style
       says (`ops`), and then is the module's own. An input that several colwise modules read is copied or
       gathered once.
    4. Attributes that count what is spread are divided. All of it is undone afterwards; the model and its
       parameters stay as they were.

With sequence parallelism, residuals are slices of the sequence (dim 1) from the first block to the norm
after the last: the input of the first block is cut, the norm's output is collected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.ir.program import Shard
from stretto.parallelize import ops
from stretto.parallelize.styles import Style, plan_of
from stretto.parallelize.vocabulary import SplitLogits, embed

AXIS = "tp"
SEQUENCE_DIM = 1
"""The dim of the sequence in activations (batch, sequence, hidden)."""


COLWISE = ("colwise", "packed_colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "rowwise_split_input")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """What is spread. shards: parameter name -> how; modules: name -> style.

    first: the first block's name, tails: norms of which one follows the last block; with sequence parallelism
    only.
    """

    size: int
    modules: Mapping[str, Style]
    shards: Mapping[str, Shard]
    first: str | None = None
    tails: tuple[str, ...] = ()

    @property
    def sequence(self) -> bool:
        return self.first is not None


@dataclass(slots=True)
class _Forward:
    """What modules share during one forward: inputs that were let in already, by identity; whether residuals
    are slices of the sequence now."""

    entered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    sliced: bool = False


def tensor_parallel(
    model: nn.Module, size: int, *, sequence: bool, plan: Mapping[str, Any] | None = None
) -> TensorParallel:
    """Steps 1 and 2. Raises UsageError for a model, a plan or sizes that do not fit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    styles = _vocabulary_fits(model, plan_of(model, plan), modules, size)
    _check_heads(model, size)
    first, tails = _sequence_region(model, modules, styles) if sequence else (None, ())
    shards: dict[str, Shard] = {}
    for name, style in styles.items():
        for key, shard in _shards(name, modules[name], style, size).items():
            shards[f"{name}.{key}" if name else key] = shard
    _check_ties(model, shards)
    _check_worth(model, shards, size)
    return TensorParallel(size, styles, shards, first, tails)


def _check_worth(model: nn.Module, shards: Mapping[str, Shard], size: int) -> None:
    total = sum(p.numel() for p in model.parameters())
    spread_out = {id(p): p.numel() for n, p in model.named_parameters(remove_duplicate=False) if n in shards}
    share = sum(spread_out.values()) / max(total, 1)
    if share < 0.5:
        warnings.warn(
            f"the tensor-parallel plan of {type(model).__name__} spreads {100 * share:.0f} % of its "
            f"parameters over {AXIS} = {size}; every rank computes the rest whole. Give a plan of your own "
            "with tp_plan",
            stacklevel=4,
        )


def _vocabulary_fits(
    model: nn.Module, styles: dict[str, Style], modules: Mapping[str, nn.Module], size: int
) -> dict[str, Style]:
    """An output head that is gathered anyway is split along the vocabulary; what cannot be stays whole."""
    result = dict(styles)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, style in styles.items():
        module = modules[name]
        if module is output and style.kind == "colwise_gather_output":
            result[name] = style = Style("vocabulary")
        if style.kind != "vocabulary":
            continue
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise UsageError(f"{name}: the style 'vocabulary' needs an embedding or a linear layer")
        odd = isinstance(module, nn.Embedding) and (
            module.max_norm is not None or module.scale_grad_by_freq or module.sparse
        )
        if weight.shape[0] % size or odd:
            why = "is of a special kind" if odd else f"has {weight.shape[0]} rows"
            warnings.warn(
                f"{name} {why} and is not spread over {AXIS} = {size}: every rank computes it whole. "
                f"Pad the vocabulary to a multiple of {size} to spread it",
                stacklevel=4,
            )
            result[name] = Style("replicated")
    # A tie is spread in all its places or in none.
    whole = {
        id(p)
        for name, style in result.items()
        if style.kind == "replicated"
        for p in modules[name].parameters(recurse=False)
    }
    for name, style in result.items():
        if style.kind == "vocabulary" and any(
            id(p) in whole for p in modules[name].parameters(recurse=False)
        ):
            result[name] = Style("replicated")
    return result


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for key in ("num_attention_heads", "num_key_value_heads", "n_head", "heads"):
        count = getattr(config, key, None)
        if isinstance(count, int) and count % size:
            raise UsageError(f"the model has {key} = {count}, which is not a multiple of {AXIS} = {size}")


def _sequence_region(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: dict[str, Style]
) -> tuple[str, tuple[str, ...]]:
    """The first block and the norms beside the blocks; these are the list that holds the rowwise modules."""
    rowwise = [name for name, style in styles.items() if style.kind in ROWWISE]
    lists = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and any(r.startswith(f"{name}.") for r in rowwise)
    }
    if len(lists) != 1:
        raise UsageError(
            f"sequence_parallel needs one list of blocks with rowwise modules in it; {type(model).__name__} "
            f"has {', '.join(lists) or 'none'}"
        )
    ((name, blocks),) = lists.items()
    inside = _whole_inside(name, styles)
    for part, module in blocks.named_modules(prefix=name, remove_duplicate=False):
        own = list(module.parameters(recurse=False))
        sees_all = any(part.startswith(f"{parent}.") for parent in inside)
        if not own or (part in styles and styles[part].kind != "replicated"):
            continue
        if not sees_all and not _is_norm(module):
            raise UsageError(
                f"sequence_parallel: {part} ({type(module).__name__}) has no style, and would see a slice of "
                "the sequence: name it in tp_plan ('colwise', 'rowwise', or 'sequence' if it works on every "
                "token alone)"
            )
        # A norm in attention (of queries, of keys) sees whole sequences.
        styles[part] = Style("replicated" if sees_all else "sequence")
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    children = [prefix + child for child, _ in modules[parent].named_children()]
    after = tuple(
        child
        for child in children
        if child != name
        and ((child in styles and styles[child].kind == "sequence") or _is_norm(modules[child]))
    )
    if not after or len(blocks) == 0:
        raise UsageError(
            f"sequence_parallel: no norm follows the blocks {name!r}, at which the sequence could be put "
            "together again"
        )
    styles.update(dict.fromkeys(after, Style("sequence")))
    return f"{name}.0", after


def _whole_inside(blocks: str, styles: Mapping[str, Style]) -> list[str]:
    """Modules of a block (attention, MLP) that gather their input, because colwise modules in them need it.

    They gather it, and not the colwise modules: their code may look at its shape before it calls them.
    Raises UsageError for colwise modules that stand in no such module.
    """
    found: dict[str, None] = {}
    for name, style in styles.items():
        if style.kind in COLWISE and name.startswith(f"{blocks}."):
            parent = name.rpartition(".")[0]
            if parent.count(".") == blocks.count(".") + 1:
                raise UsageError(
                    f"sequence_parallel: {name} stands directly in its block, whose code would see a slice "
                    "of the sequence: put it in a module of its own (attention, MLP), which then gathers its "
                    "input"
                )
            found[parent] = None
    return list(found)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("norm") or isinstance(module, nn.LayerNorm)


def _shards(name: str, module: nn.Module, style: Style, size: int) -> dict[str, Shard]:
    """Own parameter -> how it is spread."""
    kind = style.kind
    if kind in ("replicated", "sequence", "attributes"):
        return {}
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise UsageError(f"{name} ({type(module).__name__}): the style {kind!r} needs a matrix `weight`")
    if isinstance(module, nn.Embedding) and kind != "vocabulary":
        raise UsageError(f"{name}: an embedding is spread by the style 'vocabulary', not {kind!r}")
    # transformers' Conv1D keeps its matrix transposed: (in, out).
    out_dim, in_dim = (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)
    if kind in ROWWISE:
        _divides(name, weight.shape[in_dim], size, 1)
        return {"weight": Shard(AXIS, in_dim)}
    _divides(name, weight.shape[out_dim], size, style.blocks)
    shards = {"weight": Shard(AXIS, out_dim, style.blocks)}
    if getattr(module, "bias", None) is not None:
        shards["bias"] = Shard(AXIS, 0, style.blocks)
    return shards


def _divides(name: str, n: int, size: int, blocks: int) -> None:
    if n % (size * blocks):
        packed = f" of {blocks} packed matrices" if blocks > 1 else ""
        raise UsageError(f"{name}: {n} features{packed} cannot be spread equally over {AXIS} = {size}")


def _check_ties(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if shards.get(other) != shards.get(name):
            raise UsageError(
                f"{other!r} and {name!r} are one tensor, but the tensor-parallel plan spreads them "
                "differently: give both modules the same style"
            )


def local_shape(shape: torch.Size, shard: Shard, size: int) -> tuple[int, ...]:
    """The shape of one rank's part."""
    return tuple(n // size if dim == shard.dim else n for dim, n in enumerate(shape))


def local_part(whole: Tensor, shard: Shard, size: int, index: int) -> Tensor:
    """The part of rank `index`: its slice of every block along the shard's dim (a view for one block)."""
    blocks = whole.chunk(shard.blocks, dim=shard.dim)
    parts = [block.chunk(size, dim=shard.dim)[index] for block in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=shard.dim)


def whole_of(parts: list[Tensor], shard: Shard) -> Tensor:
    """The inverse of `local_part`, from the parts of all ranks in order."""
    if shard.blocks == 1:
        return torch.cat(parts, dim=shard.dim)
    pieces = [part.chunk(shard.blocks, dim=shard.dim) for part in parts]
    return torch.cat([piece[b] for b in range(shard.blocks) for piece in pieces], dim=shard.dim)


# Steps 3 and 4.


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
                "put it together again after the last block"
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
                _divide_attributes(name, module, style.attributes, how.size, undo)
            elif style.kind in COLWISE:
                if type(module).__name__ == "Conv1D":
                    _divide_attributes(name, module, ("nf",), how.size, undo)
                replace(module, _colwise(module, name, how, state, style.kind == "colwise_gather_output"))
            elif style.kind in ROWWISE:
                replace(module, _rowwise(module, name, how, style.kind == "rowwise_split_input"))
            elif style.kind == "vocabulary":
                if isinstance(module, nn.Embedding):
                    replace(module, _embedding(module, how))
                else:
                    replace(module, _head(module, how, state))
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
    name: str, module: nn.Module, attributes: tuple[str, ...], size: int, undo: list[Callable[[], None]]
) -> None:
    for attribute in attributes:
        value = getattr(module, attribute, None)
        if not isinstance(value, int) or value % size:
            raise UsageError(
                f"{name}.{attribute} is {value!r}; to be divided it must be a multiple of {AXIS} = {size}"
            )
        setattr(module, attribute, value // size)
        undo.append(lambda a=attribute, v=value: setattr(module, a, v))  # type: ignore[misc]


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
    return [] if how.first is None else _whole_inside(how.first.rpartition(".")[0], how.modules)


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
            f"sequence_parallel: {name} is called without a first argument and without hidden_states"
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
