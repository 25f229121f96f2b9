"""The race of a U-Net in small: every system runs, gradients agree, and the JSON is what the docs promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.labs import balanced_rate
from benchmarks.tables import unet_table
from benchmarks.torch_unet import SCHEDULES, After, Before
from benchmarks.unet import BLOCKING, SYSTEMS, TORCH, UNetRace, squared_error
from torch import nn

from stretto.report.rundir import load_run
from tests.benchmarks.small_race import checked_rows, run_small

SMALL: dict[str, Any] = {"channels": 16, "microbatch": 1, "microbatches": 4, "rounds": 3}


def needs_diffusers() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'stretto[diffusion]'")


def check(result: Any) -> None:
    bases = {"blocking_1f1b": BLOCKING, "torch_1f1b": TORCH}
    rows = checked_rows(result, [*SCHEDULES, *SYSTEMS], bases, error=1e-4)
    for name in SYSTEMS:
        assert len(rows[name]["exposed_s"]) == len(rows[name]["peak_bytes"]) == 2
    assert rows[BLOCKING]["overlap"] == "off"
    assert rows["auto"]["planned_s"] == min(row["planned_s"] for row in rows.values() if "planned_s" in row)
    unet_table(result).print()  # what it prints can be printed


@pytest.mark.slow
def test_small_race_runs_every_system(tmp_path: Path) -> None:
    needs_diffusers()
    check(run_small("unet", SMALL, 2, tmp_path / "race.json", str(tmp_path / "kept")))
    for name in ("blocking-1f1b", "eager-1f1b-split", "auto"):
        assert load_run(tmp_path / "kept" / name).measured is not None


@pytest.mark.slow
def test_a_probe_finds_forwards_and_what_crosses(tmp_path: Path) -> None:
    needs_diffusers()
    places = run_small("unet", SMALL, 2, tmp_path / "probe.json", "probe")
    c = SMALL["channels"]
    # Five skips, of which the smallest is joined to the hidden state, what the time step says, and gradients.
    images = 2 * c * 16**2 + c * 8**2 + 2 * c * 8**2 + (2 * c + 4 * c) * 4**2
    for work in places:
        assert work["message_bytes"] == 4 * (images + 4 * c)
        assert work["compute_us"] > 0
    forward_us = max(work["compute_us"] for work in places)
    mbit = float(balanced_rate(places).removesuffix("mbit"))
    assert 8 * places[0]["message_bytes"] / mbit == pytest.approx(forward_us, rel=0.05)


def test_the_two_halves_for_pytorch_are_the_whole() -> None:
    needs_diffusers()
    model, batch = UNetRace(**{**SMALL, "microbatches": 2}).build()
    model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    expected = squared_error(model, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    before, after = Before(model), After(model)
    crossing = before(batch["image"], batch["time"], batch["states"])
    assert len(crossing) == 2 + 5, "the hidden state, the time step, five skips"
    found = nn.functional.mse_loss(after(*crossing, states=batch["states"]), batch["noise"])
    found.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, expected)
    kept = {p for half in (before, after) for p in half.parameters()}
    assert kept == set(model.parameters()), "each parameter is on one of them"
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-10, atol=1e-12)
