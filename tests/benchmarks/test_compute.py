"""The compute race on a tiny model: what it shows, and what makes it void."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from benchmarks.racing import SAME, fresh
from benchmarks.tables import compute_table
from torch import Tensor, nn

from benchmarks import compute as bench
from stretto.config import GPTSettings
from stretto.errors import RunError


@pytest.mark.slow
def test_a_cell_compares_and_times_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench, "MODELS", {"tiny": GPTSettings(layers=2, hidden=32, heads=2, context=bench.SEQUENCE)}
    )
    cell = bench.ComputeCell("tiny", 1, microbatches=2, rounds=3, compile=False, sequence=48)
    found = bench.run_worker(cell)
    assert found["cell"]["sequence"] == 48
    assert [row["system"] for row in found["rows"]] == [bench.EAGER, bench.OURS]
    eager, ours = found["rows"]
    assert eager["ratio_to_eager"] == 1.0
    assert eager["error"] == 0.0
    assert 0.0 <= ours["error"] < SAME, "0 where sums have one order in both"
    pairs = zip(ours["rounds_s"], eager["rounds_s"], strict=True)
    assert ours["ratio_to_eager"] == sorted(mine / theirs for mine, theirs in pairs)[1]
    setup = {"sequence": bench.SEQUENCE, "dtype": "float32", "rounds": 3}
    compute_table(json.loads(json.dumps({"setup": setup, "cells": [found]}))).print()
    assert f"{ours['ratio_to_eager']:.3f}" in capsys.readouterr().out


def test_systems_that_disagree_void_the_race() -> None:
    model = nn.Linear(3, 1, bias=False)
    x = torch.ones(2, 3)

    def step(scale: float) -> Tensor:
        loss: Tensor = model(x).mean() * scale
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    systems = {
        name: fresh(model.parameters(), partial(step, scale))
        for name, scale in (("torch eager", 1.0), ("other", 1.001))
    }
    with pytest.raises(RunError, match=r"other differs from torch eager in (weight|loss) by 1.0e-03"):
        bench._compare(model, systems)
