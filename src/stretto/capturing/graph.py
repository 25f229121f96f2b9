"""The graph of a step while it is captured: as the exporter makes it, as ops, and with all that it means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from stretto.batch.constants import ConstantsWatch, Path
from stretto.ir.metrics import Metric
from stretto.ir.program import Constant, Count, Op, Shard, TensorSpec
from stretto.passes import on_graph
from stretto.passes.rewrite import Graph


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
class TracedOp:
    """An op with where it came from. segment: see `torch_adapter`; None for gradient reductions."""

    op: Op
    segment: int | None
    backward: bool


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The ops of a step. grads: parameter -> its gradient's value or None. kept: other values that must stay
    (the loss, buffers' updates), under the names of what they are."""

    ops: tuple[TracedOp, ...]
    grads: Mapping[str, str | None]
    kept: Mapping[str, str]

    def with_ops(self, ops: Iterable[TracedOp], now: Callable[[str], str]) -> TracedStep:
        """Other ops. now: what a value is called in them."""
        return TracedStep(
            tuple(ops),
            {parameter: None if value is None else now(value) for parameter, value in self.grads.items()},
            {what: now(value) for what, value in self.kept.items()},
        )


@dataclass(frozen=True, slots=True)
class Traced:
    """One microbatch's forward and backward. segments: the module that runs in each segment.

    parameters: name -> (spec, first name of its tie, value name of its gradient or None).
    buffers: name -> (spec, value name of its update or None).
    full, count, mean_over: as in `ir.program.Job`.
    shards, partial, frozen: of parameters, as in `ir.program.Parameter`.
    layers: names of the model's repeated modules (`stretto.capturing.split`).
    read, watch: as in `ir.program.Job`.
    borders: as in `JointGraph`. seen: what is observed, all in stage 0.
    """

    name: str
    ops: tuple[TracedOp, ...]
    segments: tuple[str, ...]
    parameters: Mapping[str, tuple[TensorSpec, str, str | None]]
    buffers: Mapping[str, tuple[TensorSpec, str | None]]
    constants: tuple[Constant, ...]
    batch: tuple[tuple[str, TensorSpec], ...]
    loss: str
    param_dtype: str | None
    own_dtypes: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    fixed: tuple[tuple[str, str], ...] = ()
    shards: Mapping[str, tuple[Shard, ...]] = field(default_factory=dict)
    partial: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    borders: Mapping[int, int] = field(default_factory=dict)
    full: tuple[str, ...] = ()
    count: Count | None = None
    mean_over: Count | None = None
    frozen: frozenset[str] = frozenset()
    seen: tuple[Metric, ...] = ()
    layers: frozenset[str] = frozenset()
    read: tuple[tuple[Path, str], ...] = ()
    watch: ConstantsWatch = field(default_factory=ConstantsWatch, compare=False, repr=False)


def passed(
    ops: list[TracedOp],
    roots: set[str],
    given: Mapping[str, TensorSpec],
    sharded: frozenset[str],
    skip: Collection[str],
) -> tuple[list[TracedOp], Mapping[str, str]]:
    """The ops after all passes of a graph, and what roots are called now. What a pass made has the
    origin of the op that it replaces."""
    known = {traced.op.name: traced for traced in ops}
    backward = frozenset(name for name, traced in known.items() if traced.backward)
    graph = Graph(
        tuple(traced.op for traced in ops), frozenset(roots), backward=backward, given=given, sharded=sharded
    )
    graph = on_graph(graph, skip)
    made = [replace(known[graph.origin.get(op.name, op.name)], op=op) for op in graph.ops]
    return made, graph.renamed
