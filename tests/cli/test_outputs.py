"""What commands write: wrong places are refused before any work, and what fails is reported in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from stretto.cli import plan as plan_command
from stretto.cli.main import app
from stretto.config import load_settings
from stretto.errors import StrettoError
from stretto.ir.plan import Plan
from stretto.ir.serialize import save_plan
from stretto.simulating import predict
from tests.cli.test_convert_command import FLAGS
from tests.files.test_kept import full_disk
from tests.simulating.test_engine import ONE_F_ONE_B
from tests.synthetic import make_plan

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def a_plan() -> Plan:
    plan = make_plan(ONE_F_ONE_B)
    return replace(plan, prediction=predict(plan))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(a_plan(), path)
    return path


def words_of(command: tuple[str, ...], saved: Path) -> list[str]:
    """The command with a plan file, and a settings file, that are there."""
    config = saved.with_name("c.toml")
    config.write_text("")
    return [{"PLAN": str(saved), "CONFIG": str(config)}.get(word, word) for word in command]


def refusal(*command: str) -> str:
    """How the command refuses; it must print nothing before that."""
    done = CliRunner().invoke(app, list(command))
    assert isinstance(done.exception, StrettoError), done.output
    return str(done.exception)


def begin(*command: str) -> list[str]:
    return [sys.executable, "-m", "stretto", *command]


def test_the_package_is_a_program() -> None:
    """As `torchrun -m stretto` starts it; its name in messages is the command's."""
    done = subprocess.run(begin("--version"), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("stretto ")
    wrong = subprocess.run(begin("no-such"), capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("stretto: there is no command `stretto no-such`; ")


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "nothing.toml", "-o"),
        ("simulate", "nothing.json", "--trace"),
        ("simulate", "nothing.json", "--svg"),
        ("simulate", "nothing.json", "--json"),
        ("rehearse", "nothing.json", "--rank", "0", "--trace"),
        ("schedule", "--family", "no-such", "-o"),
        ("cluster", "show", "no-such", "--save"),
        ("report", "nothing", "-o"),
    ],
)
def test_a_wrong_place_is_refused_before_anything_is_read(command: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "folder.html"  # a report's suffix is looked at first
    folder.mkdir()
    assert "does not exist; create it; nothing was begun" in refusal(
        *command, str(tmp_path / "no" / "x.html")
    )
    assert "is a folder; name a file in it; nothing was begun" in refusal(*command, str(folder))


@pytest.mark.parametrize(
    ("command", "suffix"),
    [
        (("plan", "CONFIG", "-o"), ".json"),
        (("report", "PLAN", "-o"), ".html"),
        (("report", "PLAN", "-o"), ".svg"),
        (("report", "PLAN", "-o"), ".perfetto-trace"),
        (("simulate", "PLAN", "--trace"), ".perfetto-trace"),
        (("simulate", "PLAN", "--svg"), ".svg"),
        (("simulate", "PLAN", "--json"), ".json"),
    ],
)
def test_a_full_disk_leaves_the_old_file_and_the_table(
    command: tuple[str, ...], suffix: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / f"old{suffix}"
    old.write_text("old")
    words = words_of(command, saved)
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(plan_command, "make", lambda *_, **__: a_plan())
    monkeypatch.setattr(os, "fsync", full_disk)
    done = CliRunner().invoke(app, [*words, str(old)])
    assert isinstance(done.exception, StrettoError)
    assert f"{old}: No space left on device" in str(done.exception)
    assert "step" in done.output
    assert old.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == before


@needs_full
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", [("schedule", "--list"), ("simulate", "PLAN"), ("--help",)])
def test_standard_output_on_a_full_disk(command: tuple[str, ...], unbuffered: str, saved: Path) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            begin(*words_of(command, saved)),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.stderr == "stretto: cannot write to standard output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [("schedule", "--list"), ("cluster", "list")])
def test_a_reader_that_leaves_is_no_failure_to_tell(command: tuple[str, ...], unbuffered: str) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        begin(*command),
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writes)
    assert (done.stderr, done.returncode) == ("", 1)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("convert", "--megatron", FLAGS, "--world", "1"), "-o"),
        (("simulate", "PLAN"), "--json"),
        (("report", "PLAN"), "-o"),
        (("cluster", "show", "h100x8"), "--save"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_a_file_is_written_though_nobody_reads_the_table(
    command: tuple[str, ...], option: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `stretto convert -o F ... | head -1`: the first line that is printed finds no reader."""
    out = tmp_path / ("out.html" if command[0] == "report" else "out.toml")

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(Console, "print", closed)
    monkeypatch.setattr(typer, "echo", closed)
    done = CliRunner().invoke(app, [*words_of(command, saved), option, str(out)])
    assert done.exit_code == 1
    assert out.stat().st_size > 0


def test_settings_are_written_though_nobody_reads_the_list_beside_them(tmp_path: Path) -> None:
    """`stretto convert ... 2>&1 >made.toml | head -1`: the list goes to the errors' stream."""
    reads, writes = os.pipe()
    os.close(reads)
    made = tmp_path / "made.toml"
    with made.open("w") as out:
        done = subprocess.run(
            begin("convert", "--megatron", FLAGS, "--world", "1"), stdout=out, stderr=writes
        )
    os.close(writes)
    assert done.returncode == 1
    assert load_settings(made).parallel.dp == 1
