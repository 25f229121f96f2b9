"""The yardstick: the same step for everybody, timed over all of its runs."""

from __future__ import annotations

import time

import pytest
import torch

from stretto.bench.yardstick import Yardstick


def test_it_runs_for_about_so_long_and_says_what_a_step_took() -> None:
    yardstick = Yardstick()
    begin = time.perf_counter()
    yardstick.run(1.0)
    yardstick.run(200_000.0)
    took_us = 1e6 * (time.perf_counter() - begin)
    assert took_us > 200_000.0
    assert 0.0 < yardstick.agreed_us() < took_us


def test_it_counts_what_its_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    yardstick = Yardstick()
    monkeypatch.setattr(Yardstick, "_step", lambda self: time.sleep(0.01))
    yardstick.run(50_000.0)
    assert yardstick.agreed_us() == pytest.approx(10_000.0, rel=0.5)


def test_models_that_are_made_beside_it_stay_as_they_are() -> None:
    torch.manual_seed(3)
    alone = torch.rand(4)
    torch.manual_seed(3)
    Yardstick()
    assert torch.equal(torch.rand(4), alone)
