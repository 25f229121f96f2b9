"""The order of a job that has no backward: every rank runs its stages' forwards, microbatch by microbatch.

Knows nothing of ops or times.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.ir.action import Action, Phase, Schedule


def forward_schedule(stages: int, microbatches: int, stage_ranks: Sequence[int] | None = None) -> Schedule:
    """F of each microbatch in turn through the rank's stages. stage_ranks: as in the training's schedule;
    stage i on rank i by default."""
    places = tuple(stage_ranks) if stage_ranks is not None else tuple(range(stages))
    orders = tuple(
        tuple(
            Action(stage, Phase.F, microbatch)
            for microbatch in range(microbatches)
            for stage in range(stages)
            if places[stage] == rank
        )
        for rank in range(max(places) + 1)
    )
    return Schedule("forward", stages, microbatches, places, orders)
