"""Names and layouts of weights in files of `transformers` models, which are not always those of its modules.

Experts are in files one by one and in modules as one tensor; what was saved without a head lacks a prefix.
The library applies its own rules as it loads a full model (`from_pretrained`). They are applied here to each
tensor by itself, so that a rank can read what it keeps. The names of
`transformers.core_model_loading` and `conversion_mapping` are not promised to stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

Read = Callable[[str], Tensor]
"""A full tensor of a file, by its name there."""


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """How tensors of a model come of those in files: one as it is, or several put together.

    names: tensors of files that it takes. makes: names in the model -> what comes of them, on "meta".
    make: puts them together; None where one tensor is taken as it is."""

    names: tuple[str, ...]
    makes: Mapping[str, Tensor]
    make: Callable[[Read], Mapping[str, Tensor]] | None = None


def recipes_for(
    model: nn.Module, stored: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> list[WeightRecipe]:
    """What a model of `transformers` makes of tensors in files, each by itself; also what it has no use for,
    under the name that it would have. stored: shapes and dtypes, on "meta". known: the model's state, by
    names without adapters."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    of: Any = model
    rules = conversion_mapping.get_model_conversion_mapping(of)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix, there = of.base_model_prefix, dict(known)
    joined: dict[str, list[tuple[str, str]]] = {}
    result: list[WeightRecipe] = []
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, there)
        if target not in known and name in known:
            target, pattern = loading.rename_source_key(name, [], [], prefix, there)
        if pattern is not None:
            joined.setdefault(target, []).append((name, pattern))
        else:
            result.append(WeightRecipe((name,), {target: stored[name]}))
    for target, parts in joined.items():
        make = partial(_join, of, by_pattern[parts[0][1]], target, parts)
        names = tuple(name for name, _ in parts)
        makes = make(stored.__getitem__) if target in known else {target: stored[names[0]]}
        result.append(WeightRecipe(names, makes, make))
    return result


def _join(
    model: Any, rule: Any, target: str, parts: list[tuple[str, str]], read: Read
) -> Mapping[str, Tensor]:
    rule = deepcopy(rule)
    for name, pattern in parts:
        rule.add_tensor(target, name, pattern, partial(read, name))
    made = rule.convert(target, model=model, config=model.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def may_lack(model: nn.Module, name: str) -> bool:
    """Whether the library starts a tensor afresh, without a word, where files lack it."""
    return _matches(getattr(model, "_keys_to_ignore_on_load_missing", None), name)


def may_ignore(model: nn.Module, name: str) -> bool:
    """Whether the library drops a tensor of a file without a word: tables of older versions that are computed
    now, layers that its code does not have."""
    buffers = [buffer for buffer, _ in model.named_buffers()]
    older = [r"rotary_emb\.inv_freq"] * any(one.endswith("rotary_emb.inv_freq") for one in buffers)
    older += [r"(^|\.)position_ids$"] * any(one.endswith("position_ids") for one in buffers)
    return _matches([*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *older], name)


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
