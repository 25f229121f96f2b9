"""The learning rate by step, at the points that define it."""

from __future__ import annotations

import math

import pytest

from stretto.config import LRScheduleSettings
from stretto.train.optimizer import learning_rate


def rates(steps: int, **settings: object) -> list[float]:
    schedule = LRScheduleSettings(**settings)  # type: ignore[arg-type]
    return [learning_rate(schedule, 2.0, steps, step) for step in range(steps)]


def test_the_rate_rises_linearly_and_reaches_the_highest_at_the_end_of_the_warm_up() -> None:
    assert rates(10, warmup_steps=4, kind="constant") == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6


def test_the_cosine_goes_from_the_highest_to_the_lowest() -> None:
    found = rates(11, kind="cosine", min_lr_ratio=0.1)
    assert found[0] == 2.0
    assert found[5] == pytest.approx(2.0 * 0.55)
    assert found[-1] == pytest.approx(0.2)
    quarter = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 0.2)) / 2)
    assert found[2] == pytest.approx(quarter)
    assert found == sorted(found, reverse=True)


def test_the_line_is_a_line() -> None:
    assert rates(5, kind="linear", min_lr_ratio=0.0) == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])


def test_a_run_that_is_all_warm_up_or_goes_beyond_its_steps_keeps_its_last_rate() -> None:
    assert rates(3, warmup_steps=3, kind="cosine")[-1] == 2.0
    assert rates(2, warmup_steps=8, kind="cosine") == [0.25, 0.5], "a run that ends on the way"
    schedule = LRScheduleSettings(kind="linear", min_lr_ratio=0.25)
    assert learning_rate(schedule, 1.0, 5, 9) == 0.25
