"""The order of a job that has no backward: every rank runs its stages' forwards, microbatch by microbatch.

Knows nothing of ops or times; may touch `stretto.ir` only.
"""

from __future__ import annotations

from stretto.ir.action import Action, Phase, Schedule


def forward_schedule(stages: int, microbatches: int) -> Schedule:
    """F of each microbatch in turn, one stage a rank (stage i on rank i); there is nothing to choose."""
    orders = tuple(
        tuple(Action(stage, Phase.F, microbatch) for microbatch in range(microbatches))
        for stage in range(stages)
    )
    return Schedule("forward", stages, microbatches, tuple(range(stages)), orders)
