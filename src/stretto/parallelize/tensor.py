"""Tensor and sequence parallelism: which of a model's modules are sharded over ranks, and how.

    1. The plan says which modules are sharded (`styles`). What it leaves out for sequence parallelism is
       found (`sequence`): the blocks, and the norms in and after them.
    2. Parameters of sharded modules become shards: rows, columns, or parts of packed columns (`parts`). Where
       ranks share a head of keys, they have the same rows (`heads`).
    3. What does not fit is refused: sizes, ties that would be sharded in two ways, a plan that leaves most of
       the model full.

The model is looked at and not changed; `sharded` makes it compute a part.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.ir.axes import TENSOR
from stretto.ir.program import Shard
from stretto.parallelize.heads import SPREAD, shared_heads
from stretto.parallelize.sequence import sequence_region
from stretto.parallelize.styles import ROWWISE, Style, plan_of

AXIS = TENSOR


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """What is sharded. shards: parameter name -> how; modules: name -> style. counts: module name -> its
    integers that count heads -> their value on a rank, where ranks share heads of keys.

    first: the first block's name, tails: norms of which one follows the last block; with sequence parallelism
    only.
    """

    size: int
    modules: Mapping[str, Style]
    shards: Mapping[str, Shard]
    first: str | None = None
    tails: tuple[str, ...] = ()
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def tensor_parallel(
    model: nn.Module, size: int, *, sequence: bool, plan: Mapping[str, Any] | None = None
) -> TensorParallel:
    """Decide all of it. Raises UsageError for a model, a plan or sizes that do not fit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    styles = _vocabulary_fits(model, plan_of(model, plan), modules, size)
    _check_heads(model, size)
    copies, counts = shared_heads(model, modules, styles, size)
    full = (name for name in copies if name not in styles or styles[name].kind not in SPREAD)
    styles |= dict.fromkeys(full, Style("colwise"))
    first, tails = sequence_region(model, modules, styles) if sequence else (None, ())
    shards: dict[str, Shard] = {}
    for name, style in styles.items():
        for key, shard in _shards(name, modules[name], style, size, copies.get(name, 1)).items():
            shards[f"{name}.{key}" if name else key] = shard
    _check_ties(model, shards)
    _check_worth(model, shards, size)
    return TensorParallel(size, styles, shards, first, tails, counts)


def _check_worth(model: nn.Module, shards: Mapping[str, Shard], size: int) -> None:
    total = sum(p.numel() for p in model.parameters())
    sharded_params = {
        id(p): p.numel() for n, p in model.named_parameters(remove_duplicate=False) if n in shards
    }
    share = sum(sharded_params.values()) / max(total, 1)
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
    """An output head that is gathered anyway is split along the vocabulary; what cannot be stays
    unsharded."""
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
                f"{name} {why} and is not sharded over {AXIS} = {size}: every rank computes all of it. "
                f"Pad the vocabulary to a multiple of {size} to shard it",
                stacklevel=4,
            )
            result[name] = Style("replicated")
    # A tie is sharded in all its places or in none.
    full = {
        id(p)
        for name, style in result.items()
        if style.kind == "replicated"
        for p in modules[name].parameters(recurse=False)
    }
    for name, style in result.items():
        if style.kind == "vocabulary" and any(id(p) in full for p in modules[name].parameters(recurse=False)):
            result[name] = Style("replicated")
    return result


def _check_heads(model: nn.Module, size: int) -> None:
    config = getattr(model, "config", None)
    for key in ("num_attention_heads", "n_head", "heads"):
        count = getattr(config, key, None)
        if isinstance(count, int) and count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise UsageError(
                f"the model has {key} = {count}, which is not a multiple of {AXIS} = {size}: each rank "
                f"has full heads, so give a {AXIS} that divides it ({fitting})"
            )


def _shards(name: str, module: nn.Module, style: Style, size: int, copies: int) -> dict[str, Shard]:
    """Own parameter -> how it is sharded. copies: ranks that have the same output features."""
    kind = style.kind
    if kind == "experts":
        for key, dim, blocks in style.dims:
            _divides(f"{name}.{key}", module.get_parameter(key).shape[dim], size, blocks)
        return {key: Shard(AXIS, dim, blocks) for key, dim, blocks in style.dims}
    if kind in ("replicated", "sequence", "attributes"):
        return {}
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        inner = [n for n, m in module.named_modules() if n and isinstance(m, nn.Linear)]
        how = f"Give styles to modules in it with one ({', '.join(inner)})" if inner else "Leave it out"
        raise UsageError(
            f"{name} ({type(module).__name__}): the style {kind!r} needs a matrix `weight`. {how}, or keep "
            f"it full with {{{name!r}: 'replicated'}} in tp_plan"
        )
    if isinstance(module, nn.Embedding) and kind != "vocabulary":
        raise UsageError(
            f"{name}: an embedding is sharded by the style 'vocabulary', not {kind!r}: give it that style, "
            "or leave it out of tp_plan, which keeps it replicated"
        )
    # transformers' Conv1D keeps its matrix transposed: (in, out).
    out_dim, in_dim = (1, 0) if type(module).__name__ == "Conv1D" else (0, 1)
    if kind in ROWWISE:
        _divides(name, weight.shape[in_dim], size, 1)
        return {"weight": Shard(AXIS, in_dim)}
    _divides(name, weight.shape[out_dim], size // copies, style.blocks)
    shards = {"weight": Shard(AXIS, out_dim, style.blocks, copies)}
    if getattr(module, "bias", None) is not None:
        shards["bias"] = Shard(AXIS, 0, style.blocks, copies)
    return shards


def _divides(name: str, n: int, size: int, blocks: int) -> None:
    if n % (size * blocks):
        packed = f" of {blocks} packed matrices" if blocks > 1 else ""
        raise UsageError(
            f"{name}: {n} features{packed} cannot be sharded equally over {AXIS} = {size}: give a {AXIS} "
            "that divides them, or the module the style 'replicated' in tp_plan"
        )


def _check_ties(model: nn.Module, shards: Mapping[str, Shard]) -> None:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if shards.get(other) != shards.get(name):
            raise UsageError(
                f"{other!r} and {name!r} are one tensor, but the tensor-parallel plan shards them "
                "differently: give both modules the same style"
            )
