"""The computing thread gives way to its lanes: only where it is alone, can go back, and computes alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from stretto.backend import gloo_adapter, idle_class
from stretto.backend.idle_class import is_alone, keeping_core, lanes_first
from stretto.lab import Lab
from stretto.lab.quota import find_controller

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes are Linux'")


def machine(
    folder: Path, line: str, members: list[int], parents: dict[int, int], group: str = "cpu/mine"
) -> tuple[Path, Path]:
    """A made-up /proc and /sys/fs/cgroup."""
    proc, mounts = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(f"5:memory:/other\n{line}\n")
    for pid, parent in parents.items():
        (proc / str(pid)).mkdir()
        (proc / str(pid) / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1 0")
    (mounts / group).mkdir(parents=True)
    (mounts / group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in members))
    return proc, mounts


ME = os.getpid()
SHELL, LOADER, OTHER = ME + 1, ME + 2, ME + 3
PARENTS = {ME: SHELL, SHELL: 0, LOADER: ME, OTHER: SHELL}


@pytest.mark.parametrize(
    ("line", "group", "members", "alone"),
    [
        ("1:cpu:/mine", "cpu/mine", [ME], True),
        ("1:cpu,cpuacct:/mine", "cpu,cpuacct/mine", [ME, SHELL, LOADER], True),
        ("0::/mine", "mine", [ME, LOADER], True),
        ("1:cpu:/mine", "cpu/mine", [ME, OTHER], False),
        ("0::/mine", "mine", [SHELL], False),
        ("1:cpu:/", "cpu", [ME], False),
        ("0::/", "mine", [ME], False),
        ("1:cpu:/gone", "cpu/mine", [ME], False),
    ],
)
def test_alone_in_its_group(tmp_path: Path, line: str, group: str, members: list[int], alone: bool) -> None:
    assert is_alone(*machine(tmp_path, line, members, PARENTS, group)) is alone


def classes() -> int:
    return os.sched_getscheduler(0)


def test_gives_way_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if not idle_class._can_return():
        pytest.skip("needs CAP_SYS_NICE or RLIMIT_NICE")
    monkeypatch.setattr(idle_class, "is_alone", lambda: True)
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
            assert classes() == os.SCHED_OTHER, "the thread that others wait for would stand behind them"
        torch.set_num_threads(1)
        monkeypatch.setattr(idle_class, "is_alone", lambda: False)
        with lanes_first():
            assert classes() == os.SCHED_OTHER, "it would stand behind the machine's other processes"
        monkeypatch.setattr(idle_class, "is_alone", lambda: True)
        assert gloo_adapter.move(0, os.SCHED_OTHER, os.SCHED_BATCH)
        with lanes_first():
            assert classes() == os.SCHED_BATCH, "the user's own choice stays"
    finally:
        gloo_adapter.move(0, os.SCHED_BATCH, os.SCHED_OTHER)
        torch.set_num_threads(before)


@pytest.mark.lab
def test_a_host_of_the_lab_is_alone(tmp_path: Path) -> None:
    if os.geteuid() or find_controller() is None:
        pytest.skip("needs root and the cpu controller")
    program = "from stretto.backend.idle_class import is_alone; raise SystemExit(not is_alone())"
    with Lab(hosts=2) as lab:
        assert lab.run([sys.executable, "-c", program]).exit_status == 0
        # Beside another process of the host, which it did not start.
        beside = ["sh", "-c", 'sleep 60 & "$0" -c "$1"; status=$?; kill $!; exit $status', sys.executable]
        assert lab.run([*beside, program]).exit_status == 1
