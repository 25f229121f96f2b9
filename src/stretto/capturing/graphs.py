"""Graphs of the exporter, with what they mean. Touches `torch.fx` only."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The joint graph with its calling convention in plain words.

    inputs: placeholder node -> ("param" | "buffer" | "batch" | "tangent", name or position).
    outputs: (kind, name, node or None) in order, kind in "loss", "count", "grad", "update".
    segments: the module whose code runs in each segment, by number. borders: stage of a program on several
    meshes -> the segment in which execution first goes on there. count: how many each microbatch's loss
    counts, where that is a number.
    """

    module: torch.fx.GraphModule
    inputs: dict[torch.fx.Node, tuple[str, str | int]]
    outputs: list[tuple[str, str, torch.fx.Node | None]]
    segments: list[str]
    borders: dict[int, int] = field(default_factory=dict)
    count: float | None = None
