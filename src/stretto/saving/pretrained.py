"""A Runner gets the weights of a folder of safetensors: each rank reads the boxes that it has.

1. All ranks look whether the weights are those of the model; nothing is read before all have.
2. Each reads its boxes. What is put together of several tensors (experts that are in files one by one) is
   made in full, one tensor at a time, and freed.
3. Copies are compared, as of any model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from stretto.models.weight_files import Weights, weights_folder, weights_of
from stretto.runtime import Runner
from stretto.runtime.all_or_none import together
from stretto.runtime.rank_tensors import Part
from stretto.saving.digests import refuse_others


def fill(runner: Runner, model: nn.Module, source: str | Path) -> None:
    """Give a Runner the weights of a folder that `save_pretrained` or `stretto export` wrote, or of a name of
    the Hub, in the dtype that its parameters have; every rank must call it.

    model: the one that the Runner was made of, which may be on "meta"; its own tensors stay as they are where
    the Runner has others. Raises the same UsageError on all ranks, before anything is changed, for weights
    that are not the model's, and after, where ranks read different ones.
    """
    weights = together(runner.transport, lambda: weights_of(model, weights_folder(str(source))))
    place = weights.files.folder
    refuse_others(runner.transport.all_gather(weights.files.digest), place)
    runner.unfit = f"{place} was read in part: load a full model"
    together(runner.transport, lambda: read(weights, runner.tensors.parts()))
    runner.loaded()
    runner.check_copies()


@torch.no_grad()
def read(weights: Weights, parts: dict[str, Part]) -> None:
    """Fill parts in place: `model.<name>`, `buffer.<name>`. Buffers that are not saved with a model stay."""
    wanted: dict[str, list[Part]] = {}
    for key, part in parts.items():
        stored = weights.of.get(key.partition(".")[2])
        if stored is not None:
            wanted.setdefault(stored, []).append(part)
    for recipe in {id(recipe): recipe for recipe in weights.recipes.values()}.values():
        names = [name for name in recipe.makes if name in wanted]
        made = recipe.make(weights.files.read) if recipe.make is not None and names else {}
        for name in names:
            for part in wanted[name]:
                for offsets, view in part.boxes:
                    shape = tuple(view.shape)
                    if recipe.make is None:
                        view.copy_(weights.files.box(recipe.names[0], offsets, shape))
                    else:
                        cut = tuple(
                            slice(first, first + size) for first, size in zip(offsets, shape, strict=True)
                        )
                        view.copy_(made[name][cut])
