"""The graph of a step while it is captured: as the exporter makes it, as ops, and with all that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from stretto.ir.program import Job
from stretto.passes.layout.program import StepProgram

LOSS, COUNT, GRAD, UPDATE, SEEN = "loss", "count", "grad/", "update/", "seen/"
"""Roots of a step's program, or how they begin."""


@dataclass(frozen=True, slots=True)
class JointGraph:
    """Forward and backward as PyTorch exports them, with their calling convention in plain words.

    inputs: placeholder node -> "param/<name>", "buffer/<name>", "batch/<position>" or "tangent". outputs:
    root -> node; gradients of leaves of the batch are "grad/batch/<position>".
    segments: the module whose code runs in each segment, by number. borders: stage of a program on several
    meshes -> the segment in which execution first goes on there. count: how many each microbatch's loss
    counts, where that is a number.
    """

    module: torch.fx.GraphModule
    inputs: dict[torch.fx.Node, str]
    outputs: dict[str, torch.fx.Node]
    segments: list[str]
    borders: dict[int, int] = field(default_factory=dict)
    count: float | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """One microbatch's forward and backward. program: all that is computed.

    job: what is known of it before it is cut: parameters, buffers and metrics are in no stage yet.
    segments: the module that runs in each segment. layers: names of the model's repeated modules
    (`stretto.capturing.split`). borders: as in `JointGraph`.
    """

    program: StepProgram
    job: Job
    segments: tuple[str, ...]
    layers: frozenset[str]
    borders: Mapping[int, int]
