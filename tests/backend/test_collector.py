"""While capture or planning goes on garbage is collected rarely, and afterwards as before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.backend.collector import RARELY, rarely_collected
from stretto.capturing import capture
from stretto.config import Parallel
from stretto.errors import CaptureError, PlanError
from stretto.planning.make_plan import make_plan
from tests.synthetic import make_costs, make_job


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    was = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*was)


def test_planning_leaves_the_collector_as_it_was(thresholds: tuple[int, int, int]) -> None:
    job = make_job(2, 4)
    seen: list[tuple[int, int, int]] = []
    make_plan(job, make_costs(job), schedule="auto", say=lambda line: seen.append(gc.get_threshold()))
    assert set(seen) == {RARELY}
    assert gc.get_threshold() == thresholds
    with pytest.raises(PlanError):
        make_plan(job, make_costs(job), max_bytes=1)
    assert gc.get_threshold() == thresholds


def test_capture_leaves_it_too(thresholds: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # By its module, as the package has a function of this name.
    room: Any = import_module("stretto.capturing.trace")
    own, seen = room._trace, list[tuple[int, int, int]]()

    def seeing(*given: Any, **named: Any) -> Any:
        seen.append(gc.get_threshold())
        return own(*given, **named)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    monkeypatch.setattr(room, "_trace", seeing)
    capture(nn.Linear(2, 2), torch.zeros(2, 2), loss, Parallel())
    assert set(seen) == {RARELY}
    assert gc.get_threshold() == thresholds
    with pytest.raises(CaptureError):
        capture(nn.Linear(2, 2), torch.zeros(2, 2), lambda model, x: loss(model, x).detach(), Parallel())
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("wish", [(0, 10, 10), (200_000, 100, 5_000)])
def test_who_has_it_collect_less_keeps_that(
    thresholds: tuple[int, int, int], wish: tuple[int, int, int]
) -> None:
    gc.set_threshold(*wish)
    with rarely_collected():
        assert gc.get_threshold() == wish


def test_threads_that_plan_at_once_leave_it_as_the_first_found_it(thresholds: tuple[int, int, int]) -> None:
    first, second = rarely_collected(), rarely_collected()
    with first:
        second.__enter__()
    assert gc.get_threshold() == RARELY, "the second still plans"
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds
