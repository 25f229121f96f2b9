"""Whether this process is a rank, whose, and in which phase. Loads nothing of PyTorch: a rank may be ended
while it does that."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LAUNCHER_PID = "STRETTO_LAUNCHER_PID"
"""Environment variable: our own launcher's process, for the ranks that it started."""
NOTES_DIR = "STRETTO_NOTES_DIR"
"""Environment variable: where a launched rank leaves its note, and its phase."""

_phases = [""]


def is_worker() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether that launcher was our own (`stretto.train.launch`), which speaks for its ranks."""
    return is_worker() and LAUNCHER_PID in os.environ


def tell_phase(phase: str) -> None:
    """What this process does from now on, in words, for whoever must say where it was lost."""
    _phases[0] = phase
    if is_launched() and NOTES_DIR in os.environ:
        with suppress(OSError):
            _phase_file(Path(os.environ[NOTES_DIR]), os.environ["RANK"]).write_text(phase, encoding="utf-8")


def this_phase() -> str:
    """What was told last."""
    return _phases[0]


def phase_of(folder: Path, rank: int) -> str:
    """The phase that a launched rank told last. folder: that of notes."""
    with suppress(OSError, UnicodeDecodeError):
        return _phase_file(folder, rank).read_text(encoding="utf-8")
    return "the start of its process"


def _phase_file(folder: Path, rank: int | str) -> Path:
    return folder / f"phase-{rank}"
