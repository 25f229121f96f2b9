"""Styles: the words that say how a module is sharded over tensor-parallel ranks, and plans made of them.

    colwise                 output features are sharded
    packed_colwise:K        colwise, for a matrix that is K equal ones side by side (query, key, value)
    rowwise                 input features are sharded
    vocabulary              an embedding's rows, or an output head's output features, are sharded
    experts                 a module of experts: those of its own parameters are sharded that have a style
    dim:D, dim:D:K          a parameter of experts is sharded along its dim D (which is K equal blocks)
    replicated              nothing is sharded

A style says where parameters are, and nothing else: what is communicated follows from it (`passes.layout`). A
plan maps patterns of module names to styles; `*` matches one part of a name (a layer's number). These are the
words of `transformers`, of which some say more, which is not needed here (`SYNONYMS`); PyTorch's
`ColwiseParallel`, `RowwiseParallel` and `SequenceParallel` objects are understood as well. A parameter of
experts (experts, out, in) may be colwise, packed_colwise or rowwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from stretto.errors import UsageError, meant
from stretto.models.adapters import plain_names, unwrapped
from stretto.parallelize.wrapped import named_by, no_module, own_plan

KNOWN = ("colwise", "packed_colwise", "rowwise", "vocabulary", "experts", "replicated")

EXPERTS = "experts"

SYNONYMS = {
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "vocabulary",
    "sequence": "replicated",
    "sequence_parallel": "replicated",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "replicated",
    "attributes": "replicated",  # integers that count what is sharded, which code takes as they are
}
"""Other words, as `transformers` and Stretto have or had them. What they say besides is not needed."""

GPT2_PLAN = {
    "transformer.wte": "vocabulary",
    "transformer.h.*.attn.c_attn": "packed_colwise:3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
    "lm_head": "vocabulary",
}
"""`transformers` has no plan of its own for GPT-2."""


@dataclass(frozen=True, slots=True)
class Style:
    """One style. blocks: K of packed_colwise; dims: of experts, (parameter, dim, blocks)."""

    kind: str
    blocks: int = 1
    dims: tuple[tuple[str, int, int], ...] = ()


def parse_style(given: Any, where: str, module: nn.Module | None = None) -> Style:
    """A style from its word, or from PyTorch's object for it, which on an embedding shards its rows. Raises
    UsageError that lists the words."""
    if isinstance(module, nn.Embedding) and isinstance(given, RowwiseParallel):
        _plain("output", given.output_layouts, (Replicate(), Shard(1)), where)
        return Style("vocabulary")
    if isinstance(given, ColwiseParallel):
        _plain("input", given.input_layouts, (Replicate(), Shard(1)), where)
        _plain("output", given.output_layouts, (Shard(-1), Replicate()), where)
        return Style("colwise")
    if isinstance(given, RowwiseParallel):
        _plain("input", given.input_layouts, (Shard(-1), Replicate()), where)
        _plain("output", given.output_layouts, (Replicate(), Shard(1)), where)
        return Style("rowwise")
    if isinstance(given, SequenceParallel):
        if given.sequence_sharding != (Shard(1),):
            raise UsageError(
                f"{where}: SequenceParallel along dim {given.sequence_sharding[0].dim} is not supported: the "
                "sequence is dim 1 (batch, sequence, ...)"
            )
        return Style("replicated")
    if isinstance(given, (PrepareModuleInput, PrepareModuleOutput)):
        raise UsageError(
            f"{where}: leave {type(given).__name__} out: where a sequence is gathered or sharded follows "
            "from the styles of the modules around it"
        )
    word, _, rest = str(given).partition(":")
    kind = SYNONYMS.get(word, word)
    if not isinstance(given, str) or kind not in KNOWN:
        shown = given if isinstance(given, str) else type(given).__name__
        raise UsageError(
            f"{where}: unknown style {shown!r}; {meant(word, KNOWN)}known styles: {', '.join(KNOWN)}; or "
            "PyTorch's ColwiseParallel, RowwiseParallel, SequenceParallel. Give another plan with tp_plan"
        )
    if kind == "packed_colwise":
        if rest and not (rest.isdigit() and int(rest) > 0):
            raise UsageError(f"{where}: {given!r} must name how many matrices are packed: packed_colwise:3")
        return Style(kind, blocks=int(rest or 2))
    if rest and word not in SYNONYMS:
        raise UsageError(f"{where}: the style {kind!r} takes nothing after a colon, found {given!r}")
    return Style(kind)


def _plain(side: str, layouts: Any, allowed: tuple[Any, ...], where: str) -> None:
    if len(layouts) != 1 or layouts[0] not in allowed:
        raise UsageError(
            f"{where}: {side} layouts {tuple(layouts)} are not supported, only "
            f"{' or '.join(map(str, allowed))} (sequence_parallel=True places gathers and scatters itself)"
        )


def _built_in(module: nn.Module) -> Mapping[str, str]:
    return GPT2_PLAN if getattr(getattr(module, "config", None), "model_type", "") == "gpt2" else {}


def given_plan(model: nn.Module, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Pattern -> style as it was written: the user's plan, or with None the model's own, its attribute
    `tp_plan` (own models; `transformers`) or that of a module in it, or a built-in one for its type. Raises
    UsageError without one."""
    plan = own_plan(model, "tp_plan", _built_in) if given is None else given
    if not plan:
        raise UsageError(
            f"{type(model).__name__} has no plan for tensor parallelism: give one, "
            'tp_plan={"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise", ...}'
        )
    return plan


def _dim_of(given: Any, where: str, parameter: Tensor) -> tuple[int, int]:
    """(dim, blocks) along which a parameter of experts is sharded."""
    word, *numbers = str(given).split(":")
    count = parameter.dim()
    if word == "dim" and 1 <= len(numbers) <= 2 and all(n.isdigit() for n in numbers):
        dim, blocks = int(numbers[0]), int(numbers[-1]) if len(numbers) > 1 else 1
        if dim < count and blocks > 0:
            return dim, blocks
    elif count > 1:
        style = parse_style(given, where)
        if style.kind in ("colwise", "packed_colwise"):
            return count - 2, style.blocks
        if style.kind == "rowwise":
            return count - 1, 1
    raise UsageError(
        f"{where}: a parameter of {count} dims has no style {given!r}: give 'dim:D', the number of the dim "
        "along which it is sharded, or for the dims (experts, out, in) 'colwise', 'packed_colwise', 'rowwise'"
    )


def plan_of(model: nn.Module, given: Mapping[str, Any] | None) -> dict[str, Style]:
    """Module name -> style, for the modules that have one; given: as for `given_plan`. Patterns that name
    parameters are about those of experts; a model's own plan may name others, which stay replicated. Raises
    UsageError for a model without a plan, a pattern that no module has, and for unknown styles."""
    plan = given_plan(model, given)
    result: dict[str, Style] = {}
    dims: dict[str, tuple[Any, str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    names = list(dict(model.named_parameters(remove_duplicate=False)))
    parameters = {plain: name for name, plain in plain_names(model).items()} | dict(zip(names, names))
    for pattern, style in plan.items():
        where = f"tp_plan[{pattern!r}]"
        matched = named_by(pattern, modules)
        of_experts = [] if matched else named_by(pattern, parameters)
        if not matched and not of_experts and given is not None:
            raise UsageError(f"{where}: {no_module(pattern, (*modules, *parameters))}")
        if of_experts:
            dims.update((parameters[name], (style, where)) for name in of_experts)
            continue
        parse_style(style, where, modules[matched[0]] if matched else None)
        for name in matched:
            of = parse_style(style, where, modules[name])
            result[unwrapped(modules, name) if of.kind == EXPERTS else name] = of
    for name, (style, where) in dims.items():
        module, _, key = name.rpartition(".")
        if module in result and result[module].kind == EXPERTS:
            dim = _dim_of(style, where, modules[module].get_parameter(key))
            result[module] = replace(result[module], dims=(*result[module].dims, (key, *dim)))
        elif given is not None:
            raise UsageError(
                f"tp_plan names the parameter {name!r}, which has a style only in a module of the style "
                f"'experts': give {module!r} that style, or name the module"
            )
    if not result:
        raise UsageError(
            f"no module of {type(model).__name__} has a name of its tensor-parallel plan "
            f"({', '.join(plan)}): give a plan with tp_plan={{pattern: style}}"
        )
    return result
