"""The graph of a step while it is captured: as the exporter makes it, as ops, and with all that it means."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from stretto.ir.program import Job
from stretto.passes import on_graph
from stretto.passes.layout.program import StepProgram
from stretto.passes.rewrite import Graph

LOSS, COUNT, GRAD, UPDATE, SEEN = "loss", "count", "grad/", "update/", "seen/"
"""Roots of a step's program, or how they begin."""


@dataclass(frozen=True, slots=True)
class JointGraph:
    """Forward and backward as PyTorch exports them, with their calling convention in plain words.

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


def passed(program: StepProgram, sharded: frozenset[str], skip: Collection[str]) -> StepProgram:
    """The program after all passes of a graph. What a pass made has the origin of the op that it replaces.
    sharded: values of whose first dim ranks have parts."""
    origins = {op.name: origin for op, origin in program.ops}
    graph = Graph(
        tuple(op for op, _ in program.ops),
        frozenset(program.roots.values()),
        backward=frozenset(name for name, origin in origins.items() if origin.backward),
        given=program.given,
        sharded=sharded,
    )
    graph = on_graph(graph, skip)
    ops = ((op, origins[graph.origin.get(op.name, op.name)]) for op in graph.ops)
    return program.with_ops(ops, lambda value: graph.renamed.get(value, value))
