"""Layers: the model's repeated modules, by which a text of stages cuts it (`stretto.config.stage_text`).

1. The layers are the members of the model's lists (`ModuleList`, `Sequential`) that have modules of their
   own: all of a ModuleList, and of a Sequential those whose class is there more than once, as a wrapper
   in a Sequential is no layer. A list in a list is looked into; within a layer nothing is looked for.
   Where a model has none of these, its lists' members with parameters are layers.
2. A layer counts as often as the forward calls it, in the order in which it does. What runs between two
   layers belongs to the one before.
3. "embedding" is what runs before the first layer, "loss" what runs after the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from torch import nn

from stretto.config.stage_text import EMBEDDING, LAYER, LOSS, Stages
from stretto.errors import UsageError

_LISTS = (nn.ModuleList, nn.Sequential)


def layer_names(model: nn.Module) -> frozenset[str]:
    """Step 1: the names of the model's layers; none where it has no lists."""
    members = [
        member for module in model.modules() if isinstance(module, _LISTS) for member in module.children()
    ]
    classes = Counter(type(member) for member in members if _has_parts(member))

    def repeats(module: nn.Module, member: nn.Module) -> bool:
        return _has_parts(member) and (isinstance(module, nn.ModuleList) or classes[type(member)] > 1)

    def alone(module: nn.Module, member: nn.Module) -> bool:
        return any(True for _ in member.parameters())

    return frozenset(_found("", model, repeats) or _found("", model, alone))


def _has_parts(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _found(name: str, module: nn.Module, is_layer: Callable[[nn.Module, nn.Module], bool]) -> list[str]:
    """The layers within a module."""
    found: list[str] = []
    for child, member in module.named_children():
        full = f"{name}.{child}" if name else child
        layer = isinstance(module, _LISTS) and is_layer(module, member)
        inside = [] if layer and not isinstance(member, _LISTS) else _found(full, member, is_layer)
        found += inside or ([full] if layer else [])
    return found


def stage_cuts(name: str, segments: Sequence[str], layers: Collection[str], stages: Stages) -> list[int]:
    """Steps 2 and 3: the segments that begin stages 1, 2, ..., ascending; of stages that hold nothing, that
    of the next stage.

    name: of the model, for messages. segments: the module that runs in each. Raises UsageError for a model
    without layers, and for another number of layers than it has.
    """
    begins, ends = _calls(segments, layers)
    if not begins:
        raise UsageError(
            f"split = {stages.text!r} speaks of layers, and {name} has no list of modules (ModuleList, "
            "Sequential) that its forward calls: name the modules that begin stages, as split = "
            '["blocks.4"], or give split = "auto"'
        )
    if stages.layers != len(begins):
        first, last = segments[begins[0]], segments[begins[-1]]
        raise UsageError(
            f"split = {stages.text!r} has {stages.layers} layers, and the forward of {name} calls "
            f"{len(begins)}, {first} to {last}: write {stages.with_layers(len(begins)).text!r}"
        )
    cuts: list[int] = []
    before: list[str] = []
    for words in stages.of[:-1]:
        before += words
        count = before.count(LAYER)
        if LOSS in before:
            cuts.append(len(segments))
        elif count == len(begins):
            cuts.append(ends[-1])
        elif count or EMBEDDING in before:
            cuts.append(begins[count])
        else:
            cuts.append(0)
    return cuts


def _calls(segments: Sequence[str], layers: Collection[str]) -> tuple[list[int], list[int]]:
    """The segment in which each call of a layer begins, and the first one after it."""
    begins: list[int] = []
    ends: list[int] = []
    inside: str | None = None
    for at, name in enumerate(segments):
        # A module that a layer shares with others has their name, so only the layer's holders end it.
        if inside is not None and (name in layers or not name or inside.startswith(f"{name}.")):
            if name == inside:
                continue
            ends.append(at)
            inside = None
        if inside is None and name in layers:
            begins.append(at)
            inside = name
    return begins, ends + [len(segments)] * (inside is not None)
