"""Whether a folder's weights are those of a model: every tensor of one is in the other, with its shape.

Reads headers of files; a value only where a tie must be checked. All that does not fit is reported at once,
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.models.gpt import GPT
from stretto.models.transformers_adapter import WeightRecipe, may_ignore, may_lack, recipes_for
from stretto.models.weight_files import DTYPES, WeightFiles

SHOWN = 5
"""Names of a message."""


@dataclass(frozen=True, slots=True)
class Weights:
    """files: of a folder. of: name of a parameter, or of a buffer that is saved -> the name that recipes have
    it under, which a tie may have another of. recipes: by that name."""

    files: WeightFiles
    of: dict[str, str]
    recipes: dict[str, WeightRecipe]


def weights_of(model: nn.Module, folder: Path) -> Weights:
    """A folder's weights for a model, which may be on "meta".

    Raises UsageError for a folder that has none, and for weights that lack something, have what the model has
    no use for, or another shape or kind of dtype, or two values for what the model ties.
    """
    files = WeightFiles(folder)
    strange = {one.dtype: name for name, one in files.stored.items() if one.dtype not in DTYPES}
    if strange:
        dtype, name = next(iter(strange.items()))
        raise UsageError(
            f"{folder}: {name} is {dtype}: quantised weights are not trained; take those in bfloat16"
        )
    stored = {name: files.meta(name) for name in files.stored}
    found = (
        [WeightRecipe((name,), {name: one}) for name, one in stored.items()]
        if isinstance(model, GPT)
        else recipes_for(model, stored)
    )
    recipes = {name: recipe for recipe in found for name in recipe.makes}
    result = Weights(files, {}, recipes)
    faults = list(_faults(model, result))
    if faults:
        raise UsageError("\n".join(f"{folder}: {fault}" for fault in faults))
    return result


def _faults(model: nn.Module, weights: Weights) -> Iterator[str]:
    """What does not fit, a line of each kind; fills `weights.of`."""
    own, recipes = isinstance(model, GPT), weights.recipes
    known = model.state_dict(keep_vars=True)
    ties: dict[int, list[str]] = {}
    for name, tensor in known.items():
        ties.setdefault(id(tensor), []).append(name)
    lacking, shapes, kinds = list[str](), list[str](), list[str]()
    for names in ties.values():
        there = [name for name in names if name in recipes]
        tensor = known[names[0]]
        if not there:
            lacking += [] if not own and may_lack(model, names[0]) else names[:1]
            continue
        weights.of.update(dict.fromkeys(names, there[0]))
        for name in there:
            stored = recipes[name].makes[name]
            if stored.shape != tensor.shape:
                shapes.append(f"{name} is {list(stored.shape)}, and the model's {list(tensor.shape)}")
            elif stored.is_floating_point() != tensor.is_floating_point():
                kinds.append(f"{name} is {stored.dtype}, and the model's {tensor.dtype}")
        key = "model.tie_embeddings" if own else "model.config.tie_word_embeddings"
        yield from _of_a_tie(weights, there, key)
    unused = [
        recipe.names[0]
        for name, recipe in recipes.items()
        if name not in known and (own or not (may_ignore(model, name) or may_ignore(model, recipe.names[0])))
    ]
    if lacking:
        yield f"the weights lack {_list(lacking)}: they are of another model, or of a part of this one"
    if unused:
        kind = type(model).__name__
        yield f"the weights have {_list(unused)}, of which a {kind} has no use: they are of another model"
    if shapes:
        yield f"{_list(shapes)}: give the shape that the weights have (model.config)"
    if kinds:
        yield f"{_list(kinds)}: these weights are not trained"


def _of_a_tie(weights: Weights, there: list[str], key: str) -> Iterator[str]:
    """Whether names of one tensor of the model have one value in the files. key: the setting of ties."""
    values = [(name, weights.recipes[name]) for name in there]
    if len(values) < 2 or any(recipe.make is not None for _, recipe in values):
        return
    (first, recipe), *rest = values
    for name, other in rest:
        if recipe.makes[first].shape == other.makes[name].shape and not torch.equal(
            weights.files.read(recipe.names[0]), weights.files.read(other.names[0])
        ):
            yield (f"{first} and {name} differ, and the model has one tensor for both: set {key} = false")


def _list(names: list[str]) -> str:
    more = f" (and {len(names) - SHOWN} more)" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
