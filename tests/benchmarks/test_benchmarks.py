"""All benchmarks start, what they write is looked at first, and the table of described experts is printed."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks.commands import bench, write_json
from typer.testing import CliRunner

from benchmarks import moe_described, zero_described
from stretto.errors import StrettoError, UsageError
from stretto.schedule.families import FAMILIES
from tests.files.test_kept import full_disk

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")))
def test_a_module_finds_what_it_imports(name: str) -> None:
    assert import_module(f"benchmarks.{name}").__doc__


def test_it_starts_from_a_checkout_and_lists_its_names() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True)
    assert {"pipeline", "grid", "moe-described"} <= set(done.stdout.split())


def test_a_refusal_is_a_message_and_a_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "published", "--json", str(tmp_path / "no" / "x.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stretto: --json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipeline", "--rounds", "2"], "--rounds 2: a median on a noisy machine wants 5 rounds"),
        (["pipeline", "--hosts", "3"], "--hosts 3: '3' is none of 2, 4"),
        (["pipeline", "--families", "zb-v,other"], f"choose all, or of {', '.join(FAMILIES)}"),
        (["pipeline", "--families", ""], f"choose all, or of {next(iter(FAMILIES))}"),
        (["pipeline", "--rate", "fast"], "fast"),
        (["tensor", "--rounds", "2"], "wants 3 rounds"),
        (["tensor", "--rate", "balanced,fast"], "--rate 'fast'"),
        (["tensor", "--hidden", "512"], "'512' is none of 1024, 2048"),
        (["tensor", "--pp", "1,3"], "'3' is none of 1, 2"),
        (["moe", "--rate", ""], "give rates"),
        (["moe", "--hosts", "3"], "'3' is none of 2, 4"),
        (["moe", "--routing", "even"], "choose of balanced, router"),
        (["moe", "--routing", ""], "choose of balanced, router"),
        (["dp", "--hosts", "3"], "'3' is none of 2, 4"),
        (["dp", "--zero", "2"], "'2' is none of 0, 1, 3"),
        (["unet", "--rounds", "2"], "wants 3 rounds"),
        (["unet", "--rate", "fast"], "--rate 'fast'"),
        (["reshard", "--rounds", "2"], "wants 3 rounds"),
        (["reshard", "--rate", "unlimited"], "give a rate such as 200mbit"),
        (["reshard", "--cases", "fan-in"], "choose of fan-out, devices, layouts, meshes"),
        (["compute", "--rounds", "2"], "wants 5 rounds"),
        (["compute", "--threads", "1,none"], "give numbers from 1 on"),
        (["predict", "--pp", "3"], "'3' is none of 1, 2"),
        *(
            ([name, "--json", "/no/such/folder/x.json"], "does not exist")
            for name in ("pipeline", "tensor", "moe", "unet", "reshard", "compute", "predict", "published")
        ),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, list) else "",
)
def test_wrong_usage_is_refused_before_a_lab_is_up(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(bench, arguments).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_figures_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(StrettoError, match="No space left"):
        write_json({}, tmp_path / "figures.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_table_of_described_experts(capsys: pytest.CaptureFixture[str]) -> None:
    moe_described.main(["2"])
    _, _, *rows, chosen = capsys.readouterr().out.splitlines()
    assert len(rows) == 12
    step_ms = [float(row.split("|")[2]) for row in rows]
    assert step_ms[-1] == min(step_ms)
    assert chosen.startswith("2 chunks of the sequence")


@pytest.mark.slow
def test_the_table_of_sharded_state(capsys: pytest.CaptureFixture[str]) -> None:
    zero_described.main(["gpt-zero-0"])
    *_, row = capsys.readouterr().out.strip().split("\n")
    assert float(row.split("all ")[1].split(" %")[0]) > 90
    with pytest.raises(UsageError, match="choose of: llama-8b-zero-0"):
        zero_described.main(["llama"])
