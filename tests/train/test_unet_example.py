"""The example of a task of one's own, for a few steps: two ranks, a loss that falls, a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.train.tiny import run, steps_of

for package in ("diffusers", "sklearn", "PIL"):
    pytest.importorskip(package, reason="needs pip install 'stretto[diffusion]'")


@pytest.mark.slow  # half a minute, and `test_own_task.py` has what is Stretto's of it
def test_the_unet_transformer_trains_and_draws(tmp_path: Path) -> None:
    changes = ["training.steps=30", "training.eval_every=0", "task.config.sampling_steps=4"]
    status, out, err = run(
        "train", "examples/unet_transformer.toml", f"output.run_dir={tmp_path / 'run'}", *changes
    )
    assert status == 0, err
    lines = list(steps_of(tmp_path / "run").values())
    assert lines[0]["loss"] > 0.9, "fresh weights tell nothing of the noise, whose variance is 1"
    assert sum(line["loss"] for line in lines[-5:]) / 5 < 0.5
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    picture = Path(told["samples"]).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert 0 <= told["samples_recognised"] <= 1
    assert "images/s" in out
