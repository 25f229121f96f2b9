"""In how many chunks the sequence of a model's blocks is cut (AMPipe). `stretto.passes.layout.chunks` does
it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from stretto.errors import UsageError


@dataclass(frozen=True, slots=True)
class Chunks:
    """degree: chunks of a sequence. blocks: names, in order. experts: names of modules with a row for each
    token. full: whether experts with a capacity serve all chunks together."""

    degree: int
    blocks: tuple[str, ...]
    experts: tuple[str, ...] = ()
    full: bool = False


def blocks_of(model: nn.Module) -> list[str]:
    """The names of a model's blocks: the members of the `ModuleList` with the most parameters."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if not lists:
        raise UsageError(
            f"{type(model).__name__} has no ModuleList of blocks whose sequence ampipe_degree could cut; "
            "leave it out"
        )
    name = max(lists, key=lambda one: (sum(p.numel() for p in lists[one].parameters()), -one.count(".")))
    return [f"{name}.{at}" for at in range(len(lists[name]))]
