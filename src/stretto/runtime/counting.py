"""What a step's loss is divided by: the number of microbatches, or what they count, known before the step.

Every rank is given the full batch, and counts all of it: no count is communicated, and gradients are right
from the first backward on.

1. The count's ops become a function, as a window's do. It is called for each microbatch of the full batch.
2. The tangent, from which every backward begins, is set to one over their sum. On accelerators nothing waits
   for it.
3. This rank's share of the step's loss is the sum of its microbatches' over that.

A step that counts nothing has the loss 0 / 0, NaN, as PyTorch's own mean of nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from stretto.backend.specs import constants_of
from stretto.errors import UsageError
from stretto.ir.action import Phase
from stretto.ir.plan import Item, ItemKind, Window
from stretto.ir.program import Count, Job, Op, Stage
from stretto.runtime.generate import Externals, generate
from stretto.runtime.transport import Transport

NOTED_STEPS = 8
"""First steps in which means over unequal numbers are looked for. Assumed: labels that differ do so soon."""
PHASES = (Phase.F, Phase.I, Phase.W)


class Alone:
    """Computes a value that follows from a microbatch alone. leaves: those that it reads."""

    def __init__(self, job: Job, ops: tuple[Op, ...], value: str, device: torch.device) -> None:
        read = dict.fromkeys(name for op in ops for name in op.uses)
        self.leaves = [name for name, _ in job.batch if f"batch/{name}" in read]
        alone = replace(
            job,
            stages=(Stage(0, {phase: ops if phase is Phase.F else () for phase in PHASES}),),
            edges=(),
            parameters=(),
            buffers=(),
            metrics=(),
            loss=(0, value),
        )
        window = Window("alone", ((0, Phase.F),), tuple(Item(ItemKind.OP, 0, op.name) for op in ops))
        self._run = generate(alone, window, Externals(constants_of(job, device), device)).run

    def __call__(self, *leaves: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hooks = SimpleNamespace(add_loss=lambda _, value: kept.append(value))
        self._run(hooks, dict(zip(self.leaves, leaves, strict=True)), {}, 0)
        return kept[0]


class Counter:
    """Counts the microbatches of a batch, step 1."""

    def __init__(self, job: Job, count: Count, device: torch.device) -> None:
        assert isinstance(count.value, str)
        self._alone = Alone(job, count.ops, count.value, device)
        self._leaves = self._alone.leaves
        self._full = [name in job.replicated for name in self._leaves]
        self._pieces = job.pieces

    @torch.no_grad()
    def counts(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """batch: leaves of the full batch, on the device. Returns float64 (microbatches of all copies,)."""
        cut = [
            (batch[name],) * self._pieces if full else batch[name].chunk(self._pieces)
            for name, full in zip(self._leaves, self._full, strict=True)
        ]
        counted = [self._alone(*row).reshape(()) for row in zip(*cut, strict=True)]
        return torch.stack(counted).to(torch.float64)


class Divisor:
    """What the losses of a job's microbatches are divided by; one a rank, reused for every step."""

    def __init__(self, job: Job, device: torch.device, tangent: torch.Tensor) -> None:
        """tangent: the tensor that every backward reads; written in place."""
        self._job = job
        self._tangent = tangent
        self._total: torch.Tensor | float = math.nan
        self._counter: Counter | None = None
        if job.count is not None and isinstance(job.count.value, str):
            self._counter = Counter(job, job.count, device)
        elif job.count is not None:
            assert not isinstance(job.count.value, str)
            self._total = job.count.value * job.pieces

    def begin(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Step 2. batch: leaves of the full batch."""
        if self._counter is not None:
            self._total = self._counter.counts(batch).sum()
            self._tangent.copy_(self._total.reciprocal())

    def share(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Step 3. losses: of this rank's microbatches, in ascending order."""
        stacked = torch.stack(list(losses))
        if self._job.count is not None:
            return (stacked.sum() / self._total).to(stacked.dtype)
        copies = self._job.copies
        return stacked.mean() / copies if copies > 1 else stacked.mean()

    def check(self, batch: Mapping[str, torch.Tensor], transport: Transport) -> None:
        """All ranks count the same; every rank must call it. Raises UsageError on every rank."""
        if self._counter is None or transport.size == 1:
            return
        result = transport.all_gather(float(self._counter.counts(batch).sum()))
        apart = [
            rank for rank, total in enumerate(result) if not math.isclose(total, result[0], rel_tol=1e-6)
        ]
        if apart:
            raise UsageError(
                f"rank {apart[0]} counts {result[apart[0]]:g} in the batch, rank 0 {result[0]:g}: every rank "
                "must be given the full batch, the same on all, of which it reads its part"
            )


class UnequalMeans:
    """Says once that a loss which is a mean weighs labels by how many its microbatch has."""

    def __init__(self, job: Job, device: torch.device, rank: int) -> None:
        self._left = 0
        if rank or job.mean_over is None or job.pieces == 1:
            return
        self._counter = Counter(job, job.mean_over, device)
        # To look at values on an accelerator is to wait for it: only where the first step waits anyway.
        self._left = NOTED_STEPS if device.type == "cpu" else 1

    def look(self, batch: Mapping[str, torch.Tensor]) -> None:
        """batch: leaves of the full batch."""
        if not self._left:
            return
        self._left -= 1
        counts: list[Any] = self._counter.counts(batch).tolist()
        if len(set(counts)) == 1:
            return
        self._left = 0
        shown = ", ".join(f"{count:g}" for count in counts[:8]) + (", ..." if len(counts) > 8 else "")
        warnings.warn(
            f"loss(model, microbatch) returns a mean, and microbatches count unequally ({shown}): the step "
            "is the mean of their means, which weighs a label more where there are few. For the mean "
            'over all, return (sum, count), such as F.cross_entropy(..., reduction="sum"), '
            "(labels != -100).sum(). This is stated once",
            UserWarning,
            stacklevel=2,
        )
