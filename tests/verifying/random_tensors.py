"""Random parameters of random graphs: sharded over axes, parts along them, shared by stages, tied, large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from stretto.ir.action import Phase
from stretto.ir.program import Parameter, Shard, TensorSpec

SMALL, LARGE = (16, 8), (1024, 1024)
"""Gradients that share buckets, and one that is summed alone."""


@dataclass
class Tensor:
    """A parameter that is being made. differs: whether its gradient differs along tp."""

    name: str
    stages: list[int]
    spec: TensorSpec
    shards: tuple[Shard, ...]
    partial: tuple[str, ...]
    differs: bool
    tied_to: str
    trained: bool
    grads: list[tuple[int, Phase, str]] = field(default_factory=list)

    def parameter(self) -> Parameter:
        kept, grads = tuple(self.stages), tuple(self.grads)
        return Parameter(
            self.name, self.spec, kept, grads, self.tied_to, shards=self.shards, partial=self.partial
        )


def random_tensors(draw: Random, stages: int, sizes: Mapping[str, int]) -> list[Tensor]:
    """One to three parameters a stage. sizes: of the axes other than pp that have more than one rank."""
    found: list[Tensor] = []
    for stage in range(stages):
        for k in range(draw.randint(1, 3)):
            shape = LARGE if draw.random() < 0.1 else SMALL
            sharded = [axis for axis in sizes if axis in ("ep", "tp") and draw.random() < 0.3]
            shards = tuple(Shard(axis, at % 2) for at, axis in enumerate(sharded))
            differs = "tp" in sizes and "tp" not in sharded and draw.random() < 0.5
            partial = ("tp",) if differs else ()
            name = f"p{stage}.{k}"
            spec, trained = TensorSpec(shape, "float32"), draw.random() < 0.9
            made = Tensor(name, [stage], spec, shards, partial, differs, name, trained)
            if found and draw.random() < 0.25:
                other = draw.choice(found)
                if draw.random() < 0.5 and stage not in other.stages:
                    other.stages.append(stage)
                    continue
                made = replace(other, name=name, stages=[stage], trained=draw.random() < 0.8, grads=[])
            found.append(made)
    return found
