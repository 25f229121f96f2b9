"""Ctrl-C and SIGTERM: `stretto plan` takes the best so far, or states that there is none; no file in halves;
one message from what the user started, none from its ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import stretto
from stretto.cli import main as entry
from stretto.cli.main import app
from stretto.errors import StoppedError, StrettoError
from stretto.planning import choose
from stretto.train import job as train_job
from stretto.train.interrupt import Stops
from tests.clusters import cores_file
from tests.train.tiny import write_settings

CLUSTER = cores_file(link_gbps=0.0125, latency_us=50.0)
TP = ["--set", "parallel.pp=1", "--set", "parallel.tp=2"]


@pytest.fixture(autouse=True)
def acts_on_a_lost_terminal() -> Iterator[None]:
    """SIGHUP acts as usual, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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


def signalled(call: Callable[..., Any], at: int, signum: int = signal.SIGINT) -> Callable[..., Any]:
    """The function, at whose call of that number somebody presses Ctrl-C, or sends another signal."""
    calls: list[int] = []

    def called(*given: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == at:
            signal.raise_signal(signum)
        return call(*given, **named)

    return called


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_best_so_far_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    before = signal.getsignal(signum)
    monkeypatch.setattr(choose, "reduced_best", signalled(choose.reduced_best, 3, signum))
    result = CliRunner().invoke(app, command(tmp_path))
    assert result.exit_code == 128 + signum, result.output
    assert "interrupted: this is the best plan so far" in result.output
    assert "predicted step" in result.output
    assert f"wrote {tmp_path / 'plan.json'}" in result.output
    stretto.verify(stretto.load_plan(tmp_path / "plan.json"))
    assert signal.getsignal(signum) is before


@pytest.mark.parametrize(
    ("where", "name", "at"),
    [(train_job, "trained", 1), (choose, "reduced_best", 1)],
    ids=["capture", "first"],
)
def test_where_there_is_none_nothing_is_written(
    where: Any, name: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, signalled(getattr(where, name), at))
    result = CliRunner().invoke(app, command(tmp_path))
    assert isinstance(result.exception, StoppedError), result.output
    assert result.exception.exit_status == 130
    assert "interrupted before there was a plan" in str(result.exception)
    assert not list(tmp_path.glob("*plan.json*"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("plan", ["settings.toml"]),
        ("schedule", ["--family", "gpipe"]),
        ("calibrate", []),
        ("convert", ["--megatron", "x"]),
        ("tune", ["settings.toml", "--cluster", "h100x8"]),
    ],
)
def test_a_command_that_has_nothing_to_add_says_so_too(
    module: str, words: list[str], signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(signum)

    before = signal.getsignal(signum)
    monkeypatch.setattr(import_module(f"stretto.cli.{module}"), "check_output", interrupted)
    result = CliRunner().invoke(app, [module, *words])
    assert isinstance(result.exception, StoppedError), result.output
    assert str(result.exception) == "interrupted"
    assert result.exception.exit_status == 128 + signum
    assert signal.getsignal(signum) is before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_calibration_keeps_what_was_measured(
    signum: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.measure.calibrate.calibrate_ops", lambda *_: signal.raise_signal(signum))
    out = tmp_path / "calibration.json"
    result = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "-o", str(out)])
    assert isinstance(result.exception, StrettoError), result.output
    assert f"{out} has what was measured" in str(result.exception)
    assert out.exists()


@pytest.mark.parametrize("half", [False, True])
def test_an_interrupt_that_a_library_swallows_while_it_is_loaded_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    def load(*_: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if half:
            raise ImportError("cannot load module more than once per process")
        with Stops():
            raise AssertionError("the command goes on")

    monkeypatch.setattr(entry, "import_module", load)
    result = CliRunner().invoke(app, ["cluster", "list"])
    assert isinstance(result.exception, StoppedError), result.exception
    assert result.exception.exit_status == 130


def test_what_the_caller_ignores_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `nohup`, whose terminal goes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(
            import_module("stretto.cli.schedule"),
            "check_output",
            lambda *_: signal.raise_signal(signal.SIGHUP),
        )
        words = ["--family", "gpipe", "--ranks", "2", "--microbatches", "2"]
        assert CliRunner().invoke(app, ["schedule", *words]).exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


RANK = {"RANK": "1", "WORLD_SIZE": "2"}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "stretto: interrupted\n"),
        (RANK, "stretto: interrupted\n"),
        ({**RANK, "STRETTO_LAUNCHER_PID": "1"}, ""),
    ],
    ids=["alone", "another launcher", "ours"],
)
@pytest.mark.parametrize("where", ["import_module", "app"])
def test_who_speaks_of_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    said: str,
    where: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["stretto", "train", "settings.toml"])
    if where == "app":
        monkeypatch.setattr(entry.typer.main, "get_command", interrupt)
    else:
        monkeypatch.setattr(entry, where, interrupt)
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == said
