"""Processes of a tuning: one that has ended costs what it was doing, and no more."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from stretto.planning.make_plan import plan
from stretto.tune.choices import Candidate, Layout
from stretto.tune.outcome import Planned, Refused
from stretto.tune.work import Asked, Work
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


def test_a_fault_in_one_candidate_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that one of them meets is told in its row, and the others are planned."""

    def made(job: Any, *_: object, **given: object) -> Any:
        if job.schedule == "zb-h1":
            raise AssertionError("a defect")
        return plan(job, *_, **given)

    monkeypatch.setattr("stretto.tune.work.plan", made)
    work = Work(settings(tmp_path), 2, CLUSTER, {})
    layout = Layout(2, 1, 1, 1, False, 4)
    broken, whole = (work.do(Asked(Candidate(layout, family, 1), "list")) for family in ("zb-h1", "1f1b"))
    assert isinstance(broken, Refused)
    assert broken.why.startswith("failed with AssertionError: a defect (")
    assert "test_workers.py, line " in broken.why
    assert not broken.by_memory
    assert isinstance(whole, Planned)
