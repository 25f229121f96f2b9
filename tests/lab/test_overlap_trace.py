"""The measured trace of two hosts shows compute under collectives, and none where overlap is off; their link
is slow: a collective takes 15 ms, and little processor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stretto.lab import Lab
from tests.runtime.overlap_trace import (
    assert_compute_under_collectives,
    assert_none_under_collectives_when_off,
    make_plans,
)

pytestmark = [pytest.mark.lab, pytest.mark.quiet, pytest.mark.usefixtures("machine")]


@pytest.mark.slow  # two processes without a lab show it in the shorter run
def test_the_trace_of_hosts_proves_overlap(tmp_path: Path) -> None:
    make_plans(tmp_path, bytes_per_us=37.0)
    with Lab(hosts=2, rate="300mbit", pin=True) as lab:
        command = [sys.executable, "-m", "tests.runtime.overlap_trace", str(tmp_path)]
        assert set(lab.run(command, output=tmp_path)) == {0}, (tmp_path / "host-0.log").read_text()
    assert_compute_under_collectives(tmp_path)
    assert_none_under_collectives_when_off(tmp_path)
