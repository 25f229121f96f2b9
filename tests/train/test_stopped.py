"""A stopped rank, or a stopped launcher, ends the run with a message that names it; before the steps, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.train import watch
from stretto.train.failure import Cause, enter_phase, phase_of, recorded_failures

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")


def until(done: Callable[[], bool], within_s: float = 60.0) -> None:
    ends_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STOPPED_S", 0.3)
    monkeypatch.setattr(watch, "WATCH_S", 0.02)


def test_the_launcher_ends_a_stopped_rank_and_names_its_phase(tmp_path: Path) -> None:
    ranks = [subprocess.Popen(["sleep", "60"], env={"RANK": str(rank)}) for rank in range(2)]
    try:
        (tmp_path / "phase-1").write_text("planning")
        with watch.watching_ranks(tmp_path):
            ranks[1].send_signal(signal.SIGSTOP)
            assert ranks[1].wait(60) == -signal.SIGKILL
        assert ranks[0].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    (failure,) = recorded_failures(tmp_path)
    assert (failure.rank, failure.cause, failure.lost) == (1, Cause.LOST, 1)
    assert failure.message.startswith("rank 1 has given no sign of life for ")
    assert "(phase: planning)" in failure.message


def test_a_rank_that_is_continued_soon_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "STOPPED_S", 60.0)
    rank = subprocess.Popen(["sleep", "60"], env={"RANK": "0"})
    try:
        with watch.watching_ranks(tmp_path):
            rank.send_signal(signal.SIGSTOP)
            until(lambda: watch.stopped_ranks(os.getpid()) == {0: rank.pid})
            rank.send_signal(signal.SIGCONT)
            until(lambda: watch.stopped_ranks(os.getpid()) == {})
    finally:
        rank.kill()
        rank.wait()
    assert recorded_failures(tmp_path) == []


RANK = """
    import time
    from stretto.train import watch
    from stretto.train.failure import enter_phase

    watch.STOPPED_S, watch.WATCH_S = 0.3, 0.02
    watch.watch_launcher()
    enter_phase("loading PyTorch")
    print("begun", flush=True)
    time.sleep(60)
"""
LAUNCHER = """
    import os, subprocess, sys
    os.environ |= {"STRETTO_LAUNCHER_PID": str(os.getpid()), "RANK": "1", "WORLD_SIZE": "2"}
    print("ended with", subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode, flush=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, signum: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), textwrap.dedent(RANK)],
        env={**os.environ, "STRETTO_RECORDS_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "begun\n"
        launcher.send_signal(signum)
        rest = launcher.stdout.read()  # to the end of the last of both
        launcher.wait(60)
    finally:
        launcher.kill()
    if signum == signal.SIGKILL:
        assert (rest, recorded_failures(tmp_path)) == ("", [])
        return
    assert rest == "ended with 1\n"  # the launcher was continued, and tells
    (failure,) = recorded_failures(tmp_path)
    assert failure.message.startswith(f"the launcher (process {launcher.pid}) was stopped for ")
    assert failure.message.endswith("(phase: loading PyTorch)")


def test_a_phase_is_told_to_our_own_launcher_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_RECORDS_DIR", str(tmp_path))
    enter_phase("planning")
    assert not list(tmp_path.iterdir())
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("STRETTO_LAUNCHER_PID", "1")):
        monkeypatch.setenv(name, value)
    enter_phase("planning")
    assert phase_of(tmp_path, 3) == "planning"
    assert phase_of(tmp_path, 2) == "the start of its process"
