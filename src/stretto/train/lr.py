"""The learning rate as a pure function of the step, so that resuming needs no state."""

from __future__ import annotations

import math

from stretto.config import LRScheduleSettings


def learning_rate(schedule: LRScheduleSettings, peak: float, steps: int, step: int) -> float:
    """The rate of step `step` (from 0) of `steps`; `peak` is the highest.

    It rises linearly over `warmup_steps`, the last of which has the highest rate, and then follows a half
    cosine (Loshchilov and Hutter, SGDR, 2017) or a line to `min_lr_ratio * peak` at the last step, or
    stays. Steps beyond the last keep its rate.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    way = steps - 1 - schedule.warmup_steps
    done = min(1.0, (step - schedule.warmup_steps) / way) if way > 0 else 1.0
    left = (1.0 + math.cos(math.pi * done)) / 2.0 if schedule.kind == "cosine" else 1.0 - done
    return peak * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * left)
