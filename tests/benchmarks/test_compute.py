"""The compute race on a tiny model: what it tells, and what makes it void."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.commands import bench as commands
from benchmarks.race import SAME, fresh
from benchmarks.tables import compute_table
from torch import Tensor, nn
from typer.testing import CliRunner

from benchmarks import compute as bench
from stretto.config import GPTSettings
from stretto.errors import RunError, UsageError
from stretto.models.build import build_model


@pytest.mark.slow
def test_a_cell_compares_and_times_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench, "MODELS", {"tiny": GPTSettings(layers=2, hidden=32, heads=2, context=bench.SEQUENCE)}
    )
    found = bench.run_worker(bench.Setup("tiny", 1, microbatches=2, rounds=3, compile=False, sequence=48))
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


def test_models_have_room_for_the_sequence() -> None:
    for name in bench.MODELS:
        with torch.device("meta"), torch.no_grad():
            model = build_model(bench.Setup(name, 1, sequence=320).settings, 16, seed=0)
            out = model(torch.zeros(1, 320, dtype=torch.int64))
        assert getattr(out, "logits", out).shape[:2] == (1, 320)


def test_an_unknown_model_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown model 'bert'; known are gpt 512"):
        bench.compute(["bert"], [1], 5, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "2"], "wants 5 rounds or more"),
        (["--threads", "1,none"], "give numbers from 1 on"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(commands, ["compute", *arguments])
    assert isinstance(result.exception, UsageError)
    assert text in str(result.exception)
