"""Processes of a tuning, and what they make of faults."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from stretto.planning.make_plan import plan
from stretto.tune.choices import Candidate, LayoutChoice
from stretto.tune.work import Asked, Planned, Refused, TuneWork, Workers
from tests.tune.small import CLUSTER, settings


def test_a_process_that_was_killed_costs_its_piece_and_no_more(tmp_path: Path) -> None:
    """One that has nothing to do costs the next piece."""
    candidate = Candidate(LayoutChoice(2, 1, 1, 1, False, 4), "1f1b", 1)
    quick = Asked(candidate, "list")
    with Workers(1, settings(tmp_path, layers=2), 2, CLUSTER, {}) as workers:
        for busy in (True, False):
            if busy:
                workers.give(quick)
            [process] = multiprocessing.active_children()
            process.kill()
            process.join()
            if not busy:
                workers.give(quick)
            [(asked, answer)] = workers.answers(60.0)
            assert asked == quick
            assert isinstance(answer, Refused)
            assert "ended from outside" in answer.why
        workers.give(quick)
        [(_, answer)] = workers.answers(120.0)
        assert isinstance(answer, Planned)
    assert multiprocessing.active_children() == []


def test_a_fault_in_one_candidate_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that one of them meets is reported in its row, and the others are planned."""

    def made(job: Any, *_: object, **given: object) -> Any:
        if job.schedule == "zb-h1":
            raise AssertionError("a defect")
        return plan(job, *_, **given)

    monkeypatch.setattr("stretto.tune.work.plan", made)
    work = TuneWork(settings(tmp_path), 2, CLUSTER, {})
    layout = LayoutChoice(2, 1, 1, 1, False, 4)
    broken, full = (work.do(Asked(Candidate(layout, family, 1), "list")) for family in ("zb-h1", "1f1b"))
    assert isinstance(broken, Refused)
    assert broken.why.startswith("failed with AssertionError: a defect (")
    assert "test_work.py, line " in broken.why
    assert not broken.by_memory
    assert isinstance(full, Planned)
