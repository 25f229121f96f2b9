"""The measured trace of two processes shows compute under collectives; their gradients are those of `off`.

That none is under them where overlap is off can be seen in the lab alone (`tests/lab`): on one machine the
cores that compute carry the messages too, so a collective may be over before the call that starts it returns.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import launch
from tests.runtime.overlap_trace import assert_compute_under_collectives, assert_equal_bits, make_plans


@pytest.mark.quiet
def test_the_trace_of_processes_proves_overlap(tmp_path: Path) -> None:
    make_plans(tmp_path, bytes_per_us=200.0)
    launch(2, "tests.runtime.overlap_trace", str(tmp_path))
    assert_compute_under_collectives(tmp_path)
    assert_equal_bits(tmp_path)
