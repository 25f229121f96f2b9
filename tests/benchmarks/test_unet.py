"""The race of a U-Net in small: every system runs, gradients agree, and the JSON is what the docs promise."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.commands import bench
from benchmarks.races import balanced_rate
from benchmarks.tables import unet_table
from benchmarks.torch_unet import SCHEDULES, After, Before
from benchmarks.unet import BLOCKING, SYSTEMS, TORCH, VERSION, Setup, squared_error
from torch import nn
from typer.testing import CliRunner

from benchmarks import raced, unet
from benchmarks import races as lab_races
from stretto.errors import RunError, UsageError
from stretto.report.rundir import load_run
from tests.benchmarks.small_race import run_small

SMALL: dict[str, Any] = {"channels": 16, "microbatch": 1, "microbatches": 4, "rounds": 3}


def needs_diffusers() -> None:
    pytest.importorskip("diffusers", reason="needs diffusers: pip install 'stretto[diffusion]'")


def check(result: Any) -> None:
    rows = {row["system"]: row for row in result["rows"]}
    assert list(rows) == [*SCHEDULES, *SYSTEMS]
    setup = result["setup"]
    assert 0 < setup["worst_error_vs_plain"] < 1e-4
    blocking, torch_1f1b = rows[BLOCKING]["step_s"], rows[TORCH]["step_s"]
    for name, row in rows.items():
        assert row["step_s"] == sorted(row["rounds_s"])[1]
        assert row["speedup_vs_blocking_1f1b"] == blocking / row["step_s"]
        assert row["speedup_vs_torch_1f1b"] == torch_1f1b / row["step_s"]
        assert row["ratio_to_bound"] == row["step_s"] / setup["bound_s"]
        if name not in SCHEDULES:
            assert len(row["exposed_s"]) == len(row["peak_bytes"]) == 2
            assert all(0 <= exposed <= row["step_s"] for exposed in row["exposed_s"])
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


@pytest.mark.lab
@pytest.mark.slow
def test_the_command_in_a_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_diffusers()
    monkeypatch.setattr(unet, "Setup", lambda **given: Setup(**{**SMALL, **given}))
    out = tmp_path / "unet.json"
    done = CliRunner().invoke(bench, ["unet", "--rate", "200mbit", "--rounds", "3", "--json", str(out)])
    assert done.exception is None, done.output
    read = json.loads(out.read_text())
    assert read["version"] == VERSION
    (race,) = read["races"]
    check(race)
    assert race["setup"]["rate"] == race["setup"]["asked_rate"] == "200mbit"


def test_the_two_halves_for_pytorch_are_the_whole() -> None:
    needs_diffusers()
    model, batch = Setup(**{**SMALL, "microbatches": 2}).build()
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
    held = {p for half in (before, after) for p in half.parameters()}
    assert held == set(model.parameters()), "each parameter is on one of them"
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-10, atol=1e-12)


def test_a_race_with_another_loss_is_void() -> None:
    raced.check_loss(TORCH, 2.0, 2.0)
    with pytest.raises(RunError, match=r"the loss of torch 1f1b is 2\.1, the plain model's 2.0"):
        raced.check_loss(TORCH, 2.1, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "2"], "--rounds 2: a median on a noisy machine wants 3 rounds or more"),
        (["--json", "/no/such/folder/x.json"], "the folder /no/such/folder does not exist"),
        (["--rate", "fast"], "--rate 'fast': expected a number and kbit, mbit or gbit"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(bench, ["unet", *arguments])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


def test_without_diffusers_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unet, "find_spec", lambda name: None)
    result = CliRunner().invoke(bench, ["unet"])
    assert isinstance(result.exception, UsageError)
    assert "pip install 'stretto[diffusion]'" in str(result.exception)


def test_the_command_prints_tables_and_writes_what_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, str]] = []
    place = {"compute_us": 1e5, "collective_us": 0.0, "wire_bytes": 0.0, "message_bytes": 1.5e6}

    def in_lab(module: str, setup: Setup, kept: str) -> Any:
        asked.append((module, setup.rate, kept))
        if kept == "probe":
            return [place, {**place, "compute_us": 2e5}]
        row = {
            "system": "auto",
            "schedule": "zb-h2",
            "step_s": 5.0,
            "speedup_vs_blocking_1f1b": 1.61,
            "speedup_vs_torch_1f1b": 1.72,
            "ratio_to_bound": 1.07,
            "rounds_s": [5.0] * 3,
            "exposed_s": [0.1, 0.25],
            "planned_s": 4.85,
            "measured_over_planned": 5.0 / 4.85,
        }
        theirs = {key: row[key] for key in row if "exposed" not in key and "planned" not in key}
        more = {"forward": [place], "bound_s": 4.67, "binds": "compute"}
        return {"setup": {**asdict(setup), **more}, "rows": [{**theirs, "system": TORCH}, row]}

    monkeypatch.setattr(lab_races, "in_lab", in_lab)
    monkeypatch.setattr(unet, "find_spec", lambda name: "there")
    out = tmp_path / "unet.json"
    done = CliRunner().invoke(bench, ["unet", "--json", str(out)])
    assert done.exception is None, done.output
    for text in ("60mbit", "auto (zb-h2)", "5000", "1.61", "1.72", "1.07", "250", "+3.1%"):
        assert text in done.output, text
    assert asked == [("unet", "unlimited", "probe"), ("unet", "60mbit", "")]
    read = json.loads(out.read_text())
    assert read["version"] == VERSION
    assert read["races"][0]["setup"]["asked_rate"] == "balanced"
