"""Two hosts with disks of their own: their ranks find out before anything is called a checkpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from stretto.lab import Lab
from tests.runtime.launch import REPOSITORY
from tests.train.tiny import environment, write_settings

pytestmark = [
    pytest.mark.lab,
    pytest.mark.quiet,
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare (util-linux)"),
]

OWN_DISK = 'mount -t tmpfs none "$1" && cd "$2" && shift 2 && exec "$@"'
"""A shell's words: a disk that only this process and those that it starts see, at the first argument."""


def run(disk: Path, logs: Path, *command: str) -> tuple[list[int], list[str]]:
    """Statuses, and what each of two hosts says, each with its own disk at `disk`."""
    disk.mkdir()
    words = ["unshare", "--mount", "sh", "-c", OWN_DISK, "sh", str(disk), str(REPOSITORY)]
    words += [sys.executable, "-m", "tests.lab.hurried", *command]
    with Lab(hosts=2, rate="unlimited") as lab:
        statuses = lab.run(words, environment(PYTHONPATH=str(REPOSITORY / "src")), output=logs)
    return list(statuses), [path.read_text() for path in sorted(logs.iterdir())]


def test_a_run_is_told_before_it_trains(tmp_path: Path) -> None:
    config = write_settings(tmp_path, pp=2, steps=4, every=2)
    statuses, said = run(tmp_path / "run", tmp_path / "logs", "train", str(config))
    assert statuses == [2, 2], said
    assert "the ranks do not share the folder of checkpoints: " in "".join(said)
    assert "Set checkpoint.dir to a folder that all hosts mount" in "".join(said)
    assert "step 1" not in "".join(said)


@pytest.mark.slow  # on threads in `tests/saving`
def test_ones_own_loop_is_told_at_its_first_save(tmp_path: Path) -> None:
    program = str(REPOSITORY / "examples" / "save_and_load.py")
    mine = tmp_path / "disk" / "mine"
    statuses, said = run(tmp_path / "disk", tmp_path / "logs", program, str(mine), "tp=2")
    assert statuses == [1, 1], said
    for one in said:
        assert "the ranks do not share the folder of checkpoints: " in one
        assert f"{mine}.tmp on rank 1, host " in one
        assert "Set the path to save to to a folder" in one
