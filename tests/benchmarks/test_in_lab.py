"""A worker in a lab: what it is told, what is read back, and what is said when a rank fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.in_lab import result_of

from stretto.errors import RunError
from stretto.lab import Lab, Statuses


class FakeLab(Lab):
    """A lab of two hosts of two ranks that makes nothing; its worker writes back what it was told."""

    def __init__(self, failed: int | None) -> None:
        super().__init__(hosts=2, ranks_per_host=2)
        self.failed = failed
        self.entered: list[bool] = []

    def __enter__(self) -> Lab:
        self.entered.append(True)
        return self

    def __exit__(self, *_: object) -> None:
        self.entered.append(False)

    def run(self, command: Any, env: Any = None, **options: Any) -> Statuses:  # type: ignore[override]
        assert self.entered == [True]
        assert options == {"quiet_others": True}
        statuses = Statuses([0, 0, 0, 0])
        if self.failed is not None:
            statuses.first_failed, statuses[self.failed] = self.failed, 1
        told = {"command": command[:4], "setup": json.loads(command[4]), "words": command[6:], "env": env}
        Path(command[5]).write_text(json.dumps(told))
        return statuses


def test_the_worker_is_told_its_setup_and_its_result_is_read() -> None:
    lab = FakeLab(None)
    assert result_of(lab, "some", {"threads_per_rank": 3, "rate": "1gbit"}, "probe") == {
        "command": [sys.executable, "-m", "benchmarks.in_lab", "some"],
        "setup": {"threads_per_rank": 3, "rate": "1gbit"},
        "words": ["probe"],
        "env": {"OMP_NUM_THREADS": "3", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    }
    assert lab.entered == [True, False]


def test_a_rank_that_fails_is_named_and_the_lab_is_gone() -> None:
    lab = FakeLab(3)
    with pytest.raises(RunError, match="the small race failed on host 1 rank 3; its output is above"):
        result_of(lab, "some", {"threads_per_rank": 1}, what="the small race")
    assert lab.entered == [True, False]
