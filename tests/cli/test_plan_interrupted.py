"""Ctrl-C in `stretto plan`: the best plan so far, or a sentence; status 130, and no file in halves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import stretto
from stretto.cli.main import app
from stretto.errors import StoppedError
from stretto.planning import make_plan, tries
from stretto.train import job as train_job
from tests.train.tiny import write_settings

CLUSTER = "link_bytes_per_us = 12.5\nlatency_us = 50.0\n"
TP = ["--set", "parallel.pp=1", "--set", "parallel.tp=2"]


def command(folder: Path) -> list[str]:
    config = write_settings(folder)
    (folder / "cluster.toml").write_text(CLUSTER)
    return [
        "plan",
        str(config),
        "-o",
        str(folder / "plan.json"),
        "--cluster",
        str(folder / "cluster.toml"),
        *TP,
    ]


def signalled(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, at whose call of that number somebody presses Ctrl-C."""
    calls: list[int] = []

    def called(*given: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return call(*given, **named)

    return called


def test_the_best_so_far_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tries, "least_us", signalled(tries.least_us, 3))
    result = CliRunner().invoke(app, command(tmp_path))
    assert result.exit_code == 130, result.output
    assert "interrupted: this is the best plan so far" in result.output
    assert "predicted step" in result.output
    assert f"wrote {tmp_path / 'plan.json'}" in result.output
    stretto.verify(stretto.load_plan(tmp_path / "plan.json"))
    assert signal.getsignal(signal.SIGINT) is before


def test_the_best_is_there_while_it_is_made_for_all_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the search, before its result is a whole plan."""
    best_first = tries.Tries.best_first

    def searched(self: tries.Tries, order: str) -> Any:
        found = best_first(self, order)
        monkeypatch.setattr(tries.Tries, "step", signalled(tries.Tries.step, 1))
        return found

    monkeypatch.setattr(tries.Tries, "best_first", searched)
    result = CliRunner().invoke(app, command(tmp_path))
    assert result.exit_code == 130, result.output
    stretto.verify(stretto.load_plan(tmp_path / "plan.json"))


@pytest.mark.parametrize(
    ("where", "name", "at"),
    [(train_job, "trained", 1), (tries, "least_us", 1), (make_plan, "_finished", 1)],
    ids=["capture", "first", "twice"],
)
def test_where_there_is_none_nothing_is_written(
    where: Any, name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(where, name)
    if name == "_finished":  # a second one, while the best of those before the first is proved
        monkeypatch.setattr(tries, "least_us", signalled(tries.least_us, 3))
    monkeypatch.setattr(where, name, signalled(own, at))
    result = CliRunner().invoke(app, command(tmp_path))
    assert isinstance(result.exception, StoppedError), result.output
    assert result.exception.exit_status == 130
    assert "interrupted before there was a plan" in str(result.exception)
    assert not list(tmp_path.glob("*plan.json*"))


def test_a_command_that_has_nothing_to_add_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("stretto.cli.plan"), "check_output", interrupted)
    result = CliRunner().invoke(app, ["plan", "settings.toml"])
    assert isinstance(result.exception, StoppedError)
    assert result.exception.exit_status == 130


@pytest.mark.slow
def test_a_process_shows_where_it_is_and_ends_with_130(tmp_path: Path) -> None:
    """A search that would take an hour."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", *command(tmp_path), "--set", "planning.search_s=3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "best " in line:
                break
        assert lines, process.communicate()
        assert all(line.startswith("  planning") for line in lines), lines
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "predicted step" in out
    stretto.verify(stretto.load_plan(tmp_path / "plan.json"))
