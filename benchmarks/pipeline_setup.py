"""What the pipeline race is asked: its work, the hosts, the families. Touches nothing that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from stretto.errors import UsageError, meant
from stretto.ir.stage_maps import AUTO
from stretto.models.gpt import Block, GPTConfig
from stretto.schedule.families import FAMILIES

WORKER = "pipeline"
"""The module of this room that every rank runs."""

ALL = "all"

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setup:
    """One race. layers: of the whole model, a multiple of all numbers of stages. families: those of ours that
    race, and "auto"."""

    rate: str = "100mbit"
    hidden: int = 512
    heads: int = 8
    layers: int = 8
    sequence: int = 256
    microbatches: int = 8
    microbatch_size: int = 1
    world: int = 2
    threads_per_rank: int = 1
    rounds: int = 7
    families: Sequence[str] = (*FAMILIES, AUTO)
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.world} hosts, {self.rate}"

    def build(self) -> tuple[Blocks, Batch]:
        """The model and a batch, equal in all processes."""
        torch.manual_seed(0)
        model = Blocks(self)
        size = (self.microbatches * self.microbatch_size, self.sequence, self.hidden)
        return model, {"x": torch.randn(size), "target": torch.randn(size)}

    def cuts(self, stages: int) -> list[int]:
        """The blocks with which all stages but the first begin: equal numbers in each."""
        each, left = divmod(self.layers, stages)
        if left or not each:
            raise UsageError(f"{self.layers} blocks make no {stages} equal stages")
        return [each * stage for stage in range(1, stages)]


class Blocks(nn.Sequential):
    """A stack of transformer blocks on (B, S, D) activations: what the middle of a GPT computes."""

    def __init__(self, setup: Setup) -> None:
        config = GPTConfig(
            vocab_size=1,
            layers=setup.layers,
            hidden=setup.hidden,
            heads=setup.heads,
            context=setup.sequence,
            positions="learned",
        )
        super().__init__(*(Block(config) for _ in range(config.layers)))


def squared_error(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean squared error of the stack's output against a target, both (B, S, D)."""
    return nn.functional.mse_loss(model(batch["x"]), batch["target"])


HOSTS = {2: Setup(world=2), 4: Setup(world=4)}
"""Number of hosts -> the race; all have the same model and microbatches."""


def races(rate: str, hosts: Sequence[int], families: Sequence[str], *, rounds: int) -> list[Setup]:
    """One race for each number of hosts."""
    return [replace(HOSTS[world], rate=rate, families=families, rounds=rounds) for world in hosts]


def chosen(words: Sequence[str]) -> list[str]:
    """Families by their names, in the order in which they are listed; `ALL` is all of them. Raises UsageError
    for another word."""
    known = (*FAMILIES, AUTO)
    unknown = [word for word in words if word not in (*known, ALL)]
    if unknown or not words:
        near = meant(unknown[0], (*known, ALL)) if unknown else ""
        raise UsageError(
            f"--families {','.join(words)}: {near}choose {ALL}, or of {', '.join(known)}, with commas between"
        )
    return [name for name in known if ALL in words or name in words]
