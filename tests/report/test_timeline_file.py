"""Timelines of files: what is told by rank is of the ranks that there are, and every time is a number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stretto
from stretto.bounds.words import format_us
from stretto.errors import UsageError
from stretto.report.files import load_timeline, save_json
from tests.synthetic import make_job


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ranks": 10**9}, "expected spans, peaks and memory of as many ranks as `ranks` counts"),
        ({"ranks": 0}, "of as many ranks as"),
        ({"members": 10**9}, "of as many ranks as"),
        ({"memory": [[]]}, "of as many ranks as"),
        ({"step_us": "inf"}, "step_us: expected a number up to"),
        ({"busy_us": ["nan"]}, r"busy_us\[0\]: expected a number up to"),
    ],
    ids=str,
)
def test_a_timeline_of_other_ranks_or_times(tmp_path: Path, change: dict[str, object], told: str) -> None:
    path = tmp_path / "t.json"
    save_json(stretto.simulate(stretto.plan(make_job(2, 2), stretto.Cluster())), path)
    assert load_timeline(path).ranks == 2
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match=told):
        load_timeline(path)


def test_a_time_that_is_no_number_has_words() -> None:
    assert [format_us(us) for us in (float("inf"), float("nan"), 1.5)] == ["inf", "nan", "1.5 us"]
