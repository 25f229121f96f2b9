"""The GPT of the races that plan it: its shape and layout, its batch, its job, and what one microbatch asks.

Touches no process group and no file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

import stretto
from stretto.ir.costs import Costs
from stretto.ir.program import Job, OverlapMode
from stretto.ir.transfers import axis_time, time_of
from stretto.models.gpt import GPT, GPTConfig, next_token_loss

AXIS = "tp"

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Shapes are those of the full model and of one microbatch of a rank. rate: as the lab takes it."""

    rate: str = "unlimited"
    hidden: int = 1024
    heads: int = 16
    layers: int = 3
    vocab: int = 4096
    sequence: int = 256
    microbatch: int = 2
    microbatches: int = 8
    rounds: int = 5
    threads_per_rank: int = 1
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.microbatch * self.microbatches

    def build(self) -> tuple[GPT, Batch]:
        """The model and the full batch, equal in all processes."""
        torch.manual_seed(0)
        shape = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        model = GPT(GPTConfig(vocab_size=self.vocab, context=self.sequence, **shape))
        size = (self.rows, self.sequence)
        return model, {name: torch.randint(0, self.vocab, size) for name in ("input_ids", "labels")}


@dataclass(frozen=True, slots=True)
class GPTWork(GPTShape):
    """That of a pipeline and tensor parallelism."""

    pp: int = 1
    tp: int = 2
    sequence_parallel: bool = False

    @property
    def world(self) -> int:
        return self.pp * self.tp

    @property
    def layout(self) -> str:
        """In words: `pp=1 tp=2 sp`."""
        return f"pp={self.pp} tp={self.tp}{' sp' if self.sequence_parallel else ''}"

    def capture(
        self,
        model: GPT,
        batch: Batch,
        *,
        split: list[str] | Literal["auto"] = "auto",
        overlap: OverlapMode = "window",
    ) -> Job:
        parallel = stretto.Parallel(
            pp=self.pp,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            microbatches=self.microbatches,
            schedule="1f1b",
            split=split,
            overlap=overlap,
        )
        return stretto.capture(model, batch, loss=next_token_loss, parallel=parallel)


@dataclass(frozen=True, slots=True)
class RankWork:
    """What one microbatch asks of a pipeline rank. compute_us: of ops; collective_us: of an axis's
    collectives that have their links for themselves; wire_bytes: what these move, each way; message_bytes:
    what messages take from it to other ranks."""

    compute_us: float
    collective_us: float
    wire_bytes: float
    message_bytes: float

    @property
    def ratio(self) -> float:
        """Time of collectives over that of compute."""
        return self.collective_us / self.compute_us if self.compute_us else 0.0


def work_of(job: Job, costs: Costs, stages: Iterable[int], axis: str = AXIS) -> RankWork:
    """The work of one microbatch on a pipeline rank of `stages`, and what it communicates over `axis`."""
    stages = frozenset(stages)
    compute_us = collective_us = wire_bytes = 0.0
    for index in sorted(stages):
        for op in (op for ops in job.stages[index].ops.values() for op in ops):
            compute_us += time_of(costs, index, op)
            asked = op.collective
            if asked is not None and asked.axis == axis:
                collective_us += axis_time(costs, axis, asked.kind, asked.nbytes).us
                assert op.kind is not None
                wire_bytes += op.kind.moved(job.size(axis)) * asked.nbytes
    leaving = [edge for edge in job.edges if edge.source in stages and edge.target not in stages]
    return RankWork(compute_us, collective_us, wire_bytes, float(sum(edge.spec.nbytes for edge in leaving)))
