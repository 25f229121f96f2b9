"""What commands print fits every terminal: narrow ones, and such whose encoding is not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto.cli.main import app
from stretto.ir.serialize import save_plan
from tests.cli.test_convert_command import FLAGS
from tests.cli.test_outputs import a_plan

COMMANDS = [
    ("--help",),
    ("report", "--help"),
    ("report", "PLAN"),
    ("simulate", "PLAN"),
    ("cost", "PLAN"),
    ("verify", "PLAN"),
    ("show", "PLAN", "--stage", "0", "--phase", "F"),
    ("schedule", "--list"),
    ("schedule", "--family", "zb-h1", "--ranks", "4", "--microbatches", "8"),
    ("schedule", "--family", "zb-h1", "--ranks", "4", "--microbatches", "8", "--format", "svg"),
    ("cluster", "list"),
    ("cluster", "show", "h100x16"),
    ("reshard", "--shape", "64,64", "--src", "2x2:S0R", "--dst", "2x2:RS1"),
    ("convert", "--megatron", f"{FLAGS} --überflüssig", "--world", "1"),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A plan of a model whose name is no ASCII."""
    plan = a_plan()
    path = tmp_path / "plan.json"
    save_plan(replace(plan, job=replace(plan.job, name="Modèle→x²")), path)
    return path


@pytest.mark.parametrize("environment", [{"COLUMNS": "10"}, {"COLUMNS": "1"}, {"PYTHONIOENCODING": "ascii"}])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:24])
def test_every_command_can_print(command: tuple[str, ...], environment: dict[str, str], saved: Path) -> None:
    charset = environment.get("PYTHONIOENCODING", "utf-8")
    words = [str(saved) if word == "PLAN" else word for word in command]
    done = CliRunner(charset=charset).invoke(app, words, env=environment)
    assert done.exception is None, (done.output, done.exception)
    assert done.output


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii", "COLUMNS": "10"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
    ids=lambda one: " ".join(one.values()),
)
def test_a_process_whose_output_is_not_utf_8(environment: dict[str, str], saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "report", str(saved)],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"predicted" in done.stdout.lower()


def test_what_is_a_file_stays_utf_8(tmp_path: Path) -> None:
    """Settings on standard output are read again: nothing in them may become a question mark."""
    flags = f"{FLAGS} --data-path /données/été"
    settings = [
        CliRunner(charset=charset).invoke(app, ["convert", "--world", "1", "--megatron", flags]).stdout_bytes
        for charset in ("utf-8", "ascii")
    ]
    assert settings[0] == settings[1]
    assert "données".encode() in settings[0]
