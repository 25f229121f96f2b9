"""docs/accelerators.md shows a generated window as it is."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

import stretto
from tests.clusters import cores


def test_the_window_that_the_page_shows() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    parallel = stretto.Parallel(
        pp=2,
        tp=2,
        microbatches=2,
        split=["2"],
        overlap="local",
        schedule="1f1b",
        tp_plan={"0": "colwise", "2": "rowwise"},
    )
    job = stretto.capture(model, torch.randn(4, 4), loss=lambda m, x: m(x).mean(), parallel=parallel)
    plan = stretto.plan(job, cores())
    sources = stretto.run_threads(
        plan,
        lambda _: copy.deepcopy(model),
        lambda runner: {n: w.source for n, w in runner.state.windows.items()},
    )
    page = (Path(__file__).parents[2] / "docs" / "accelerators.md").read_text()
    assert f"```text\n{sources[2]['1F']}```" in page
