"""The example of large U-Nets: planned by the command, without a device, in the time that a user waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app

pytest.importorskip("diffusers", reason="needs pip install 'stretto[diffusion]'")

PATIENCE_S = 120.0
"""What planning may take."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "millions", "mib"), [(320, 588, 250), (480, 1322, 375), (672, 2590, 526)]
)
def test_a_large_one_is_planned_on_a_laptop(channels: int, millions: int, mib: int, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    began = time.process_time()
    words = f"plan examples/unet_large.toml --cluster h100x16 --set task.config.channels={channels} -o {out}"
    done = CliRunner().invoke(app, words.split())
    took_s = time.process_time() - began
    assert done.exception is None, done.output
    assert took_s < PATIENCE_S
    plan = stretto.load_plan(out)
    job = plan.job
    assert round(sum(p.spec.numel for p in job.parameters) / 1e6) == millions
    crossing = [edge.spec for edge in job.edges if edge.source == 0]
    images = sorted(spec.shape[1:] for spec in crossing if len(spec.shape) == 4)
    c = channels
    # The fifth skip is joined to the hidden state by the module that the cut is in front of.
    assert images == sorted([(c, 32, 32), (c, 32, 32), (c, 16, 16), (2 * c, 16, 16), (6 * c, 8, 8)])
    assert round(sum(spec.nbytes for spec in crossing) / 2**20) == mib
    stretto.verify(plan)
    assert plan.prediction is not None
    assert plan.prediction.bound_us <= plan.prediction.step_us < 1.5 * plan.prediction.bound_us
