"""Ctrl-C before a command has begun: one message from what the user started, none from its ranks."""

from __future__ import annotations

import sys

import pytest

from stretto.cli import main as entry

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
