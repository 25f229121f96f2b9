"""Clipping by the norm of the full model's gradient, of which each rank has a part.

1. Each rank takes the norms of the gradients that it owns (`Runner.owns`: a tied one counts once), of a
   sharded one, or one that is kept in parts, the norm of its part.
2. Each has an index in one vector, zeros elsewhere, which is all-reduced over the ranks: a sum with
   zeros is exact, so every rank has the norms that a single process would have computed of these parts.
3. The norm of that vector is the global norm, with the same bits on every rank, and under any split into
   stages or copies; parts of a matrix add up in another order than the matrix, to the rounding of sums.
4. Each rank scales its own gradients, the factor being that of `torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stretto.errors import UsageError
from stretto.ir.collectives import ALL_REDUCE
from stretto.ir.kept import part_count, part_number
from stretto.ir.plan import NORM
from stretto.ir.program import Job
from stretto.ir.updates import norm_spec
from stretto.runtime import Runner


class GradientClip:
    """Clips a Runner's gradients to a global norm. All ranks make one, at the same point."""

    def __init__(self, runner: Runner, max_norm: float) -> None:
        """max_norm: the largest norm that is left as it is; 0 measures and does not clip."""
        job = runner.plan.job
        if job.updates:
            raise UsageError(
                "the plan updates parameters, so no gradients are left to clip after a step: capture with "
                "Parallel(updates=True, clip_norm=...); runner.grad_norm is the norm then"
            )
        index, count = _indices(job, runner.coordinates)
        tied_to = {p.name: p.tied_to for p in job.parameters}
        self._max_norm = max_norm
        self._parameters = [p for n, p in runner.named_parameters() if tied_to[n] in index]
        self._owned = [
            (index[tied_to[name]], parameter)
            for name, parameter in runner.named_parameters()
            if tied_to[name] in index and runner.owns(name)
        ]
        dtype = getattr(torch, norm_spec(job).dtype)  # of other ranks' gradients too: all send the same
        self._norms = torch.zeros(count, dtype=dtype, device=runner.device)
        self._transport = runner.transport
        if runner.transport.size > 1:
            everyone = runner.plan.everyone(NORM)
            runner.transport.open((*runner.plan.communicators, everyone), runner.device, runner.plan.mesh)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        """Scale the gradients in place; returns the global norm before (0-d), the same on every rank.

        Every rank must call it. Raises LostRankError when one does not.
        """
        self._norms.zero_()
        for at, parameter in self._owned:
            if parameter.grad is not None:
                own = parameter.grad.as_subclass(torch.Tensor)  # a part's knows that it is one
                self._norms[at] = torch.linalg.vector_norm(own)
        if self._transport.size > 1:
            self._transport.collective(NORM, ALL_REDUCE.name, self._norms, self._norms, "sum").wait()
        total: torch.Tensor = torch.linalg.vector_norm(self._norms)
        if self._max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_norm, total)
        return total


def _indices(job: Job, coordinates: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """First name of a tie -> the index of this rank's part in the vector, and the vector's length."""
    indices: dict[str, int] = {}
    length = 0
    for parameter in job.parameters:
        if parameter.grads and parameter.tied_to not in indices:
            part, parts = 0, 1
            for shard in parameter.shards:
                count = shard.parts(job.size(shard.axis))
                part, parts = part * count + shard.part(coordinates[shard.axis]), parts * count
            count = part_count(job, parameter)
            part, parts = part * count + part_number(job, parameter, coordinates), parts * count
            indices[parameter.tied_to] = length + part
            length += parts
    return indices, length
