"""The computing thread gives way to its lanes: only where it is alone, can go back, and computes alone."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from stretto.backend import gloo_adapter
from stretto.backend.gloo_adapter import ALONE, keeping_core, lanes_first
from stretto.lab import Lab, cluster
from stretto.lab.quota import find_controller

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes are Linux'")


def classes() -> int:
    return os.sched_getscheduler(0)


def test_gives_way_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if not gloo_adapter._can_return():
        pytest.skip("needs CAP_SYS_NICE or RLIMIT_NICE")
    monkeypatch.setenv(ALONE, "1")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with lanes_first():
            assert classes() == os.SCHED_IDLE
            with keeping_core():
                assert classes() == os.SCHED_OTHER
            assert classes() == os.SCHED_IDLE
        with keeping_core():
            assert classes() == os.SCHED_OTHER
        assert classes() == os.SCHED_OTHER
        torch.set_num_threads(2)
        with lanes_first():
            assert classes() == os.SCHED_OTHER, "the thread that others wait for would be behind them"
        torch.set_num_threads(1)
        monkeypatch.delenv(ALONE)
        with lanes_first():
            assert classes() == os.SCHED_OTHER, "it would be behind the machine's other processes"
        monkeypatch.setenv(ALONE, "1")
        assert gloo_adapter.move(0, os.SCHED_OTHER, os.SCHED_BATCH)
        with lanes_first():
            assert classes() == os.SCHED_BATCH, "the user's own choice stays"
    finally:
        gloo_adapter.move(0, os.SCHED_BATCH, os.SCHED_OTHER)
        torch.set_num_threads(before)


@pytest.mark.lab
def test_a_host_of_the_lab_is_alone() -> None:
    if os.geteuid() or find_controller() is None:
        pytest.skip("needs root and the cpu controller")
    program = f"import os; raise SystemExit({ALONE!r} not in os.environ)"
    assert cluster.ALONE == ALONE
    with Lab(hosts=2) as lab:
        assert lab.run([sys.executable, "-c", program]).exit_status == 0
    with Lab(hosts=1, ranks_per_host=2) as lab:
        assert lab.run([sys.executable, "-c", program]).exit_status == 1, "each has the other beside it"
