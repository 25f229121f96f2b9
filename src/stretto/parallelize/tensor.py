"""Tensor and sequence parallelism: which of a model's parameters are sharded over ranks, and how.

    1. The plan says which modules are sharded (`styles`). Their parameters become shards: rows, columns, or
       parts of packed columns.
    2. With sequence parallelism, what enters the blocks is sharded along the sequence. They are the lists of
       modules that have the rowwise modules.
    3. What does not fit is refused: sizes, ties that would be sharded in two ways.

The model is looked at and not changed; passes make a rank's part of its step (`stretto.passes.layout`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from stretto.errors import UsageError
from stretto.ir.axes import TENSOR
from stretto.ir.program import Shard
from stretto.parallelize.styles import EXPERTS, Style, plan_of
from stretto.parallelize.wrapped import along, matrix_of

AXIS = TENSOR


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """What is sharded. shards: parameter name -> how; firsts: with sequence parallelism, the first block of
    each list of blocks; mixtures: modules with experts in them."""

    size: int
    shards: Mapping[str, Shard]
    firsts: tuple[str, ...] = ()
    mixtures: tuple[str, ...] = ()


def tensor_parallel(
    model: nn.Module, size: int, *, sequence: bool, plan: Mapping[str, Any] | None = None
) -> TensorParallel:
    """Decide all of it. Raises UsageError for a model, a plan or sizes that do not fit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    styles = _vocabulary_fits(model, plan_of(model, plan), modules, size)
    config = getattr(model, "config", None)
    for key in ("num_attention_heads", "n_head", "heads"):
        count = getattr(config, key, None)
        if isinstance(count, int) and count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise UsageError(
                f"the model has {key} = {count}, which is not a multiple of {AXIS} = {size}: each rank "
                f"has full heads, so give a {AXIS} that divides it ({fitting})"
            )
    shards: dict[str, Shard] = {}
    for name, style in styles.items():
        for key, shard in _shards(name, modules[name], style, size).items():
            shards[f"{name}.{key}" if name else key] = shard
    shards |= _of_other_names(model, styles, shards)
    _check_shards(model, shards, size)
    firsts = first_blocks(model, modules, styles) if sequence else ()
    experts = (name for name, style in styles.items() if style.kind == EXPERTS and "." in name)
    return TensorParallel(size, shards, firsts, tuple(name.rpartition(".")[0] for name in experts))


def _of_other_names(
    model: nn.Module, styles: Mapping[str, Style], shards: Mapping[str, Shard]
) -> dict[str, Shard]:
    """What a tensor's other names have, of which the plan says nothing: a wrapper may keep a module twice."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    result: dict[str, Shard] = {}
    for one in names.values():
        known = [shards[name] for name in one if name in shards]
        if known:
            free = (n for n in one if n not in shards and n.rpartition(".")[0] not in styles)
            result |= dict.fromkeys(free, known[0])
    return result


def _check_shards(model: nn.Module, shards: Mapping[str, Shard], size: int) -> None:
    first: dict[int, str] = {}
    sharded: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if shards.get(other) != shards.get(name):
            raise UsageError(
                f"{other!r} and {name!r} are one tensor, but the tensor-parallel plan shards them "
                "differently: give both modules the same style"
            )
        if name in shards:
            sharded[id(parameter)] = parameter.numel()
    share = sum(sharded.values()) / max(sum(p.numel() for p in model.parameters()), 1)
    if share < 0.5:
        warnings.warn(
            f"the tensor-parallel plan of {type(model).__name__} shards {100 * share:.0f} % of its "
            f"parameters over {AXIS} = {size}; every rank computes all of the rest. Give a plan of your own "
            "with tp_plan",
            stacklevel=4,
        )


def _vocabulary_fits(
    model: nn.Module, styles: dict[str, Style], modules: Mapping[str, nn.Module], size: int
) -> dict[str, Style]:
    """An output head that is gathered anyway is sharded along the vocabulary; else it is replicated."""
    result = dict(styles)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    for name, style in styles.items():
        module = modules[name]
        if module is output and style.kind == "colwise":
            result[name] = style = Style("vocabulary")
        if style.kind != "vocabulary":
            continue
        matrix = matrix_of(module)
        if matrix is None:
            raise UsageError(f"{name}: the style 'vocabulary' needs an embedding or a linear layer")
        rows = matrix.inputs if matrix.is_embedding else matrix.outputs
        odd = any(
            isinstance(one, nn.Embedding)
            and (one.max_norm is not None or one.scale_grad_by_freq or one.sparse)
            for one in module.modules()
        )
        if rows % size or odd:
            why = "is of a special kind" if odd else f"has {rows} rows"
            warnings.warn(
                f"{name} {why} and is not sharded over {AXIS} = {size}: every rank computes all of it. "
                f"Pad the vocabulary to a multiple of {size} to shard it",
                stacklevel=4,
            )
            result[name] = Style("replicated")
    # A tie is sharded in all its places or in none.
    own = {name: {id(p) for p in modules[name].parameters()} for name in result}
    full = set().union(*(own[name] for name, style in result.items() if style.kind == "replicated"))
    for name, style in result.items():
        if style.kind == "vocabulary" and own[name] & full:
            result[name] = Style("replicated")
    return result


def _shards(name: str, module: nn.Module, style: Style, size: int) -> dict[str, Shard]:
    kind = style.kind
    if kind == "experts":
        for key, dim, blocks in style.dims:
            _divides(f"{name}.{key}", module.get_parameter(key).shape[dim], size, blocks)
        return {key: Shard(AXIS, dim, blocks) for key, dim, blocks in style.dims}
    if kind == "replicated":
        return {}
    matrix = matrix_of(module)
    if matrix is None:
        inner = [n for n, m in module.named_modules() if n and isinstance(m, nn.Linear)]
        how = f"Give styles to modules in it with one ({', '.join(inner)})" if inner else "Leave it out"
        raise UsageError(
            f"{name} ({type(module).__name__}): the style {kind!r} needs a matrix `weight`. {how}, or keep "
            f"it replicated with {{{name!r}: 'replicated'}} in tp_plan"
        )
    if matrix.is_embedding and kind != "vocabulary":
        raise UsageError(
            f"{name}: an embedding is sharded by the style 'vocabulary', not {kind!r}: give it that style, "
            "or leave it out of tp_plan, which keeps it replicated"
        )
    of_inputs = kind == "rowwise" or matrix.is_embedding
    count, blocks = matrix.inputs if of_inputs else matrix.outputs, 1 if kind == "rowwise" else style.blocks
    _divides(name, count, size, blocks)
    return {key: Shard(AXIS, dim, blocks) for key, dim in along(module, count, of_inputs=of_inputs)}


def _divides(name: str, n: int, size: int, blocks: int) -> None:
    if n % (size * blocks):
        packed = f" of {blocks} packed matrices" if blocks > 1 else ""
        raise UsageError(
            f"{name}: {n} features{packed} cannot be sharded equally over {AXIS} = {size}: give a {AXIS} "
            "that divides them, or the module the style 'replicated' in tp_plan"
        )


def first_blocks(
    model: nn.Module, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]
) -> tuple[str, ...]:
    """The first of the blocks: of each list that has rowwise modules, as an encoder's and a decoder's."""
    rowwise = [name for name, style in styles.items() if style.kind == "rowwise"]
    lists: dict[str, str] = {}  # the outermost, which come first -> its first block
    for name, module in modules.items():
        inner = any(name.startswith(f"{other}.") for other in lists)
        if _is_list(module) and not inner and any(r.startswith(f"{name}.") for r in rowwise):
            lists[name] = f"{name}.{next(iter(dict(module.named_children())))}"
    if not lists:
        raise UsageError(
            f"sequence_parallel needs a list of blocks with rowwise modules in it; {type(model).__name__} "
            "has none: give the blocks' output projections the style 'rowwise' in tp_plan, in an "
            "nn.ModuleList, or leave sequence_parallel out"
        )
    return tuple(lists.values())


def _is_list(module: nn.Module) -> bool:
    """A `ModuleList`, or a `ModuleDict` of equal blocks, each with modules of its own."""
    if not isinstance(module, nn.ModuleDict):
        return isinstance(module, nn.ModuleList)
    lists = (nn.ModuleList, nn.ModuleDict)
    blocks = [one for one in module.values() if not isinstance(one, lists) and list(one.children())]
    return 1 < len(blocks) == len(module) and len(set(map(type, blocks))) == 1
