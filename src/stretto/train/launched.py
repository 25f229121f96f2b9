"""Whether this process is a rank, and whose. Without PyTorch: Ctrl-C may come before it is loaded."""

from __future__ import annotations

import os

LAUNCHER_PID = "STRETTO_LAUNCHER_PID"
"""Environment variable: our own launcher's process, for the ranks that it started."""


def is_worker() -> bool:
    """Whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether that launcher was our own (`stretto.train.launch`), which speaks for its ranks."""
    return is_worker() and LAUNCHER_PID in os.environ
