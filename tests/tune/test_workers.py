"""Processes of a tuning: one that has ended costs what it was doing, and no more."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from stretto.tune.choices import Candidate, Layout
from stretto.tune.outcome import Refused
from stretto.tune.work import Asked
from stretto.tune.workers import Worker, Workers
from tests.tune.small import CLUSTER, settings


def test_a_process_that_ended_while_it_was_idle_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(asked: Asked) -> Refused:
        return Refused(asked.candidate, "ended")

    def worker() -> tuple[Worker, Any]:
        ours, theirs = multiprocessing.Pipe()
        return Worker(multiprocessing.Process(), ours), theirs

    workers = Workers(1, settings(tmp_path), 2, CLUSTER, {}, lost)
    (gone, its_end), (other, kept) = worker(), worker()
    its_end.close()
    workers.all = [gone]
    monkeypatch.setattr(workers, "_started", lambda: other)
    asked = Asked(Candidate(Layout(2, 1, 1, 1, False, 4), "1f1b", 1), "list")
    workers.give(gone, asked)
    assert workers.answers(1.0) == [(asked, Refused(asked.candidate, "ended"))]
    assert workers.idle() == [other]
    kept.close()
