"""How a model is laid out: what is sharded over ranks, and cut in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from stretto.config import ParallelSettings
from stretto.errors import UsageError
from stretto.ir.program import Shard
from stretto.parallelize.experts import ExpertParallel, expert_parallel, experts_in
from stretto.parallelize.parts import local_shape
from stretto.parallelize.tensor import TensorParallel, tensor_parallel


@dataclass(frozen=True, slots=True)
class Chunks:
    """How the sequence of blocks is cut (AMPipe). degree: chunks of it. blocks: names, in order. full:
    whether experts with a capacity serve all chunks together."""

    degree: int
    blocks: tuple[str, ...]
    full: bool = False


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Each is None where there is nothing of the kind. context: ranks that share the sequence; context_kind:
    as the setting `cp_kind`. mixtures: names of the modules of experts that are one op each while the model
    is traced."""

    tensor: TensorParallel | None = None
    experts: ExpertParallel | None = None
    chunks: Chunks | None = None
    context: int = 1
    context_kind: str = "auto"
    mixtures: tuple[str, ...] = ()

    @property
    def by_passes(self) -> bool:
        """Whether passes lay out what is traced."""
        return self.context > 1 or any(part is not None for part in (self.tensor, self.experts, self.chunks))

    @property
    def shards(self) -> dict[str, tuple[Shard, ...]]:
        """Parameter name -> how it is sharded, over one axis or several."""
        result: dict[str, tuple[Shard, ...]] = {}
        for how in (self.experts, self.tensor):
            for name, shard in () if how is None else how.shards.items():
                result[name] = (*result.get(name, ()), shard)
        return result

    @property
    def traced(self) -> RankLayout:
        """What the model is traced with."""
        return RankLayout(mixtures=self.mixtures)

    def with_tensor(self, shards: Mapping[str, Shard]) -> RankLayout:
        """The same with other shards over tensor-parallel ranks."""
        return self if self.tensor is None else replace(self, tensor=replace(self.tensor, shards=shards))

    @property
    def evaluating(self) -> RankLayout:
        """The same, of an evaluation: a run does not end for text of which nothing is learned, so that what
        finds no room in `ep_buffer` is dropped, and can be seen."""
        return self if self.experts is None else replace(self, experts=replace(self.experts, fails=False))


def part_shapes(model: nn.Module, how: TensorParallel | ExpertParallel | None) -> dict[int, tuple[int, ...]]:
    """id of a parameter that is sharded -> the shape of a rank's part."""
    shards = {} if how is None else how.shards
    return {
        id(p): local_shape(p.shape, shards[name], how.size)
        for name, p in model.named_parameters(remove_duplicate=False)
        if how is not None and name in shards
    }


def layout_of(
    model: nn.Module,
    parallel: ParallelSettings,
    tp_plan: Mapping[str, Any] | None = None,
    degree: int | None = None,
) -> RankLayout:
    """What the settings ask for. degree: chunks, where that is to be chosen ("auto"), else 1 then. Raises
    UsageError for a model, a plan or sizes that do not fit."""
    tensor = experts = None
    if parallel.tp > 1:
        plan = tp_plan if tp_plan is not None else parallel.tp_plan
        tensor = tensor_parallel(model, parallel.tp, sequence=parallel.sequence_parallel, plan=plan)
    if parallel.ep > 1:
        experts = expert_parallel(model, parallel)
    if degree is None:
        degree = 1 if parallel.ampipe_degree == "auto" else parallel.ampipe_degree
    chunks, mixtures = None, () if experts is None else experts.modules
    if degree > 1:
        chunks = Chunks(degree, tuple(blocks_of(model)), parallel.ampipe_capacity == "whole")
    if experts is None and (degree > 1 or parallel.cp > 1):
        mixtures = experts_in(model, parallel.ep_plan)
    return RankLayout(tensor, experts, chunks, parallel.cp, parallel.cp_kind, mixtures)


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
