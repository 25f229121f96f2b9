"""Damaged files, and files of strangers: refused in one message, or read; nothing is run, nothing is written
outside of the folder that was named, and little memory is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import strangers
from tests.damage_corpus import Kind, corpus
from tests.strangers import try_files


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return corpus(tmp_path_factory.mktemp("sound"), runs=False)


def test_all_of_them_are_read_while_they_are_sound(kinds: dict[str, Kind], tmp_path: Path) -> None:
    assert all(kind.readers for kind in kinds.values())
    readers = [(kind.sound, reader) for kind in kinds.values() for reader in kind.readers]
    for number, (sound, reader) in enumerate(readers):
        out = tmp_path / str(number)
        out.mkdir()
        reader(sound, out)


def test_some_dozens_in_this_process(kinds: dict[str, Kind], tmp_path: Path) -> None:
    told = try_files(kinds, 40, 3, tmp_path, print)
    assert told.wrong == []
    assert sum(told.refused.values()) > 20


def test_what_watches_sees_all_that_must_not_be(tmp_path: Path) -> None:
    """A reader that writes, runs, connects or fails is told of."""
    (tmp_path / "a.txt").write_text("1, 2")
    outside = tmp_path / "outside"

    def fails(path: Path, out: Path) -> None:
        raise KeyError("x")

    def writes(path: Path, out: Path) -> None:
        (out / "fine").write_text("")
        outside.write_text("")

    def makes(path: Path, out: Path) -> None:
        os.mkdir(outside.with_name("folder"))

    def runs(path: Path, out: Path) -> None:
        subprocess.run(["true"], check=True)

    for reader, seen in ((fails, "KeyError"), (writes, "open"), (makes, "os.mkdir"), (runs, "Popen")):
        told = try_files({"a": Kind(tmp_path / "a.txt", (reader,))}, 1, 0, tmp_path / "tries", print)
        assert seen in told.wrong[0][2]
        assert told.tries == {"a": 1}


@pytest.mark.slow
def test_two_thousand(tmp_path: Path) -> None:
    """A process of its own, whose peak is that of the readers."""
    ended = subprocess.run(
        [sys.executable, "-m", strangers.__name__, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    peak_gb = float(ended.stdout.split("peak ")[1].split()[0])
    assert peak_gb < 2.0
