"""`stretto train` on an accelerator: it trains there, and goes on from a checkpoint bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.train.export import export

pytestmark = pytest.mark.gpu

SETTINGS = """
[model]
layers = 2
hidden = 128
heads = 4
context = 64

[data]
sequence_length = 64
vocab_size = 512
paths = ["{text}"]
cache_dir = "{cache}"

[training]
steps = 20
global_batch = 16
sample_tokens = 8
device = "{device}"

[output]
run_dir = "{run}"
"""


DEVICE = "cuda"


def losses(folder: Path, run: str, *changes: str) -> list[float]:
    """Of one run."""
    text, config = folder / "text.txt", folder / f"{run}.toml"
    text.write_text("".join(f"{k} times {k} is {k * k}. " for k in range(20_000)))
    names = {"text": text, "cache": folder / "cache", "run": folder / run, "device": DEVICE}
    config.write_text(SETTINGS.format(**names))
    said = CliRunner().invoke(app, ["train", str(config), *changes])
    assert said.exit_code == 0, said.output
    print(said.output)
    lines = [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_it_trains_and_goes_on(tmp_path: Path) -> None:
    full = losses(tmp_path, "whole", "checkpoint.every_steps=10")
    assert len(full) == 20
    assert full[-1] < 0.8 * full[0]
    middle = tmp_path / "whole" / "checkpoints" / "step-000010"
    assert losses(tmp_path, "rest", f"checkpoint.resume={middle}") == full[10:]


def test_it_starts_from_weights_that_were_exported(tmp_path: Path) -> None:
    """Of the Runner's own device, read box by box."""
    first = losses(tmp_path, "first")
    export(tmp_path / "first", tmp_path / "out")
    on = losses(tmp_path, "on", f"model.pretrained={tmp_path / 'out'}", "data.vocab_size=")
    assert on[0] < first[0] - 0.8 * (first[0] - first[-1])
