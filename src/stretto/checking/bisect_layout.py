"""Which part of a layout makes a step compute something else than the plain model.

Where a parameter is says nothing of numbers, which are those of the plain model however it is laid out. So
what differs is a fault of a layout, or of the model (a state of its own). Parts of the layout are left out in
turn until the step is right: sequence parallelism, tensor parallelism, all other ranks and chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stretto.config import ParallelSettings

Trial = Callable[[ParallelSettings, Mapping[str, Any] | None], bool | None]
"""Whether a layout is right; None where it cannot be tried."""

SINGLE_RANK = {
    key: ParallelSettings.model_fields[key].default
    for key in (
        *("pp", "dp", "ep", "ep_buffer", "ep_overflow", "ampipe_degree", "ampipe_capacity"),
        *("pipe_experts", "pipe_experts_multi_data", "tp"),
    )
}
"""Settings of a step on one rank that is cut in nothing but microbatches."""


def bisect_layout(parallel: ParallelSettings, tp_plan: Mapping[str, Any] | None, right: Trial) -> list[str]:
    """Lines that name the part of the layout that makes the difference."""
    left_out: dict[str, dict[str, Any]] = {
        "sequence_parallel": {"sequence_parallel": False},
        "tp": {"tp": 1, "tp_plan": None},
    }
    for key, update in left_out.items():
        if getattr(parallel, key) == ParallelSettings.model_fields[key].default:
            continue
        asked = getattr(parallel, key)
        parallel, tp_plan = parallel.model_copy(update=update), None if key == "tp" else tp_plan
        if right(parallel, tp_plan):
            return [
                f"without {key} = {asked!r} it is right, and a layout must not change numbers: leave it out, "
                "and report the model"
            ]
    used = {key: value for key, value in SINGLE_RANK.items() if getattr(parallel, key) != value}
    one = parallel.model_copy(update={**used, "split": "auto"})
    one = one.model_copy(update={"microbatches": parallel.microbatches * parallel.dp})
    if used and right(one, None):
        differing = " or ".join(f"{key} = {getattr(parallel, key)!r}" for key in used)
        return [f"on one rank it is right: {differing} makes the difference"]
    return [
        "on one rank it differs, too: the model computes something else when it runs again (a state of its "
        "own that is no buffer, a value kept from one call to the next), or the capture is at fault"
    ]
