"""The ops of a stage one after the other, over and over: compute that is the step's own.

For what is measured beside compute. What a transport does to an op depends on the op: how much of the caches
it lives on, and for how long. Touches no file, and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from stretto.ir.flow import PHASES
from stretto.ir.program import Job, Stage
from stretto.measure.profile import make_calls, make_inputs

LITTLE_US = 500.0
"""Ops are run on until they have taken so long: clocks are not read for every view."""


def looped_ops(
    job: Job, stage: Stage, device: torch.device, op_us: Mapping[tuple[int, str], float]
) -> Callable[[], float]:
    """A function that runs the next ops of F, I and W in turn; it says what they take alone (us).

    op_us: as a profile found it. Memory: as one microbatch of a profile. To be called under `no_grad`. Raises
    ValueError where no op of the stage takes any time.
    """
    mine = {name: us for (index, name), us in op_us.items() if index == stage.index}
    if not sum(mine.values()) > 0.0:
        raise ValueError(f"no op of stage {stage.index} has a time")
    ops = _run(job, stage, device, mine)

    def compute() -> float:
        work_us = 0.0
        while work_us < LITTLE_US:
            work_us += next(ops)
        return work_us

    return compute


def _run(job: Job, stage: Stage, device: torch.device, op_us: Mapping[str, float]) -> Iterator[float]:
    given, calls = make_inputs(job, stage, device), make_calls(job, stage, device)
    grads: dict[str, torch.Tensor] = {}
    while True:
        values: dict[str, Any] = dict(given)
        for phase in PHASES:
            for call in calls[phase]:
                call.run(values, grads)
                yield op_us.get(call.op.name, 0.0)
