"""How ranks end: a stopped rank or launcher is noticed and named, also before the steps; a rank in a long
step is not missed; a signal ends a run wherever it is handled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from stretto.train import failure, peers
from stretto.train.failure import Cause, enter_phase, phase_of, recorded_failures
from stretto.train.interrupt import Interrupted, Interrupts
from stretto.train.peers import BEAT_S, LOST_AFTER_S, Neighbour, heartbeat
from stretto.train.world import World

HOUR_S = 3600.0

# A launcher and its ranks.

on_linux = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")


def until(done: Callable[[], bool], within_s: float = 60.0) -> None:
    ends_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


@on_linux
@pytest.mark.parametrize("continued", [False, True])
def test_the_launcher_ends_a_rank_that_stays_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continued: bool
) -> None:
    monkeypatch.setattr(failure, "STOPPED_S", 60.0 if continued else 0.3)
    monkeypatch.setattr(failure, "WATCH_S", 0.02)
    sleep = shutil.which("sleep")
    assert sleep is not None
    for rank in range(2):  # a process is named after its file
        (tmp_path / f"rank {rank}").symlink_to(sleep)
    ranks = [subprocess.Popen(["sleep", "60"], executable=tmp_path / f"rank {n}") for n in range(2)]
    (tmp_path / "phase-1").write_text("planning")
    try:
        with failure.watching_ranks(tmp_path):
            ranks[1].send_signal(signal.SIGSTOP)
            if continued:
                until(lambda: failure.stopped_ranks(os.getpid()) == {1: ranks[1].pid})
                ranks[1].send_signal(signal.SIGCONT)
                until(lambda: failure.stopped_ranks(os.getpid()) == {})
            else:
                assert ranks[1].wait(60) == -signal.SIGKILL
        assert ranks[0].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    records = [
        (one.rank, one.cause, one.lost, "planning" in one.message) for one in recorded_failures(tmp_path)
    ]
    assert records == ([] if continued else [(1, Cause.LOST, 1, True)])


RANK = """
    import time
    from stretto.train import failure

    failure.STOPPED_S, failure.WATCH_S = 0.3, 0.02
    failure.watch_launcher()
    failure.enter_phase("loading PyTorch")
    print("begun", flush=True)
    time.sleep(60)
"""
LAUNCHER = """
    import os, subprocess, sys
    os.environ |= {"STRETTO_LAUNCHER_PID": str(os.getpid()), "RANK": "1", "WORLD_SIZE": "2"}
    print("ended with", subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode, flush=True)
"""


@on_linux
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
    assert rest == "ended with 1\n"  # the launcher was continued, and prints
    (record,) = recorded_failures(tmp_path)
    assert f"process {launcher.pid}" in record.message
    assert "phase: loading PyTorch" in record.message


def test_a_phase_is_recorded_for_our_own_launcher_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_RECORDS_DIR", str(tmp_path))
    enter_phase("planning")
    assert not list(tmp_path.iterdir())
    for name, value in (("RANK", "3"), ("WORLD_SIZE", "4"), ("STRETTO_LAUNCHER_PID", "1")):
        monkeypatch.setenv(name, value)
    enter_phase("planning")
    assert phase_of(tmp_path, 3) == "planning"
    assert "start" in phase_of(tmp_path, 2)


# Beats.


def looks(neighbour: Neighbour, beat: bytes, from_s: float, to_s: float, ended: bool = False) -> list[float]:
    """When it is lost, of looks every `BEAT_S` that see the same beat."""
    times = [from_s + BEAT_S * n for n in range(int((to_s - from_s) / BEAT_S) + 1)]
    return [time_s for time_s in times if neighbour.is_lost(beat, ended, time_s, time_s)]


def test_a_rank_is_lost_when_its_beats_stop() -> None:
    neighbour = Neighbour(0.0)
    for number in range(100):  # a step takes longer, and its rank beats
        assert not neighbour.is_lost(b"%d training" % number, False, BEAT_S * number, BEAT_S * number)
    last_s = BEAT_S * 99
    first_s = looks(neighbour, neighbour.beat, last_s + BEAT_S, last_s + 60.0)[0]
    assert first_s == last_s + LOST_AFTER_S + BEAT_S
    assert looks(Neighbour(0.0), b"7 training", 0.0, HOUR_S, ended=True) == []
    assert looks(Neighbour(0.0), b"", 0.0, HOUR_S) == [], "it has not begun"


def test_one_that_was_itself_stopped_counts_anew() -> None:
    neighbour = Neighbour(0.0)
    assert looks(neighbour, b"1 training", 0.0, 10.0) == []
    assert looks(neighbour, b"1 training", HOUR_S, HOUR_S + LOST_AFTER_S) == []
    assert looks(neighbour, b"1 training", HOUR_S + LOST_AFTER_S + BEAT_S, HOUR_S + 60.0)


def test_who_stops_is_reported_with_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT_S", 0.01)
    monkeypatch.setattr(peers, "LOST_AFTER_S", 0.1)
    store = dist.TCPStore(
        "127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    store.set("stretto/beat/1", "1 capturing the model")  # and no other
    lost: list[tuple[int, str]] = []
    reported = threading.Event()

    def report(rank: int, phase: str) -> None:
        lost.append((rank, phase))
        reported.set()

    enter_phase("planning")
    with heartbeat(World(0, 2, 2, store), report):
        assert reported.wait(60.0)
    assert lost == [(1, "capturing the model")]
    assert store.get("stretto/beat/0").endswith(b" planning")
    assert store.get("stretto/ended/0") == b"1"


# Signals.


class Dying:
    """Its destructor cannot raise."""

    def __init__(self, die: Callable[[], None]) -> None:
        self.die = die

    def __del__(self) -> None:
        self.die()
        time.sleep(0)  # where Python handles a signal


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_destructor(signum: int, capfd: pytest.CaptureFixture[str]) -> None:
    before, stuck = signal.getsignal(signum), list[Interrupted]()
    with Interrupts(stuck.append) as interrupts:
        interrupts.stuck_s = 0.1
        dying = Dying(lambda: signal.raise_signal(signum))
        del dying
        until(lambda: bool(stuck))
    assert stuck[0].status == 128 + signum
    assert interrupts.received is stuck[0]
    assert capfd.readouterr().err == ""
    assert signal.getsignal(signum) is before


def test_other_exceptions_of_destructors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("its own")

    errors: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: errors.append(unraisable.exc_type))
    with Interrupts(lambda _: None):
        dying = Dying(fail)
        del dying
    assert errors == [KeyError]
