"""The examples of tasks of your own: one trains for a few steps, a large one is planned without a device."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.train.tiny import run, steps_of
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app

pytest.importorskip("diffusers", reason="needs pip install 'stretto[diffusion]'")

PATIENCE_S = 120.0
"""What planning may take."""


@pytest.mark.slow  # half a minute, and `test_own_task.py` has what is Stretto's of it
def test_the_unet_transformer_trains_and_draws(tmp_path: Path) -> None:
    for package in ("sklearn", "PIL"):
        pytest.importorskip(package)
    changes = ["training.steps=30", "training.eval_every=0", "task.config.sampling_steps=4"]
    status, out, err = run(
        "train", "examples/unet_transformer.toml", f"output.run_dir={tmp_path / 'run'}", *changes
    )
    assert status == 0, err
    lines = list(steps_of(tmp_path / "run").values())
    assert lines[0]["loss"] > 0.9, "fresh weights know nothing of the noise, whose variance is 1"
    assert sum(line["loss"] for line in lines[-5:]) / 5 < 0.5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert Path(summary["samples"]).read_bytes().startswith(b"\x89PNG")
    assert 0 <= summary["samples_recognised"] <= 1
    assert "images/s" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "millions", "mib"), [(320, 588, 250), (480, 1322, 375), (672, 2590, 526)]
)
def test_a_large_one_is_planned_on_a_laptop(channels: int, millions: int, mib: int, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    began = time.process_time()
    words = f"plan examples/unet_large.toml --cluster h100x16 --set task.config.channels={channels} -o {out}"
    done = CliRunner().invoke(app, words.split())
    assert done.exception is None, done.output
    assert time.process_time() - began < PATIENCE_S
    plan = stretto.load_plan(out)
    assert round(sum(p.spec.numel for p in plan.job.parameters) / 1e6) == millions
    crossing = [edge.spec for edge in plan.job.edges if edge.source == 0]
    images = sorted(spec.shape[1:] for spec in crossing if len(spec.shape) == 4)
    c = channels
    # The fifth skip is joined to the hidden state by the module that the cut is in front of.
    assert images == sorted([(c, 32, 32), (c, 32, 32), (c, 16, 16), (2 * c, 16, 16), (6 * c, 8, 8)])
    assert round(sum(spec.nbytes for spec in crossing) / 2**20) == mib
    stretto.verify(plan)
    assert plan.prediction is not None
    assert plan.prediction.bound_us <= plan.prediction.step_us < 1.5 * plan.prediction.bound_us
