"""A rank that is stopped is missed while its connections stay open; one in a long step is not."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from stretto.train import heartbeat
from stretto.train.heartbeat import Heartbeat
from stretto.train.world import World

SIZE = 3


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    monkeypatch.setattr(heartbeat, "LOST_AFTER_S", 0.5)
    monkeypatch.setattr(heartbeat, "STORE_S", 1.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False
    )


class Silent:
    def __init__(self, stuck: threading.Event) -> None:
        self.set = lambda *_: stuck.wait(5.0)
        self.check = lambda _: False


def beating(store: dist.TCPStore, ranks: range, missed: list[tuple[int, int]]) -> list[Heartbeat]:
    made = [
        Heartbeat(World(rank, SIZE, SIZE, store), lambda lost, rank=rank: missed.append((rank, lost)))
        for rank in ranks
    ]
    return [one.__enter__() for one in made]


def wait_for(missed: list[tuple[int, int]], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not missed and time.monotonic() < until_s:
        time.sleep(0.02)


@pytest.mark.usefixtures("quick")
def test_the_rank_before_misses_one_that_stops(store: dist.TCPStore) -> None:
    missed: list[tuple[int, int]] = []
    beats = beating(store, range(SIZE), missed)
    time.sleep(1.0)  # a step takes longer than that, and its rank beats
    assert not missed
    stuck = threading.Event()
    beats[2]._store = Silent(stuck)  # as a stopped process: it neither beats nor parts
    wait_for(missed, 5.0)
    assert missed == [(1, 2)]
    stuck.set()
    for one in beats:
        one.__exit__()


@pytest.mark.usefixtures("quick")
def test_a_rank_that_has_ended_is_not_missed(store: dist.TCPStore) -> None:
    missed: list[tuple[int, int]] = []
    beats = beating(store, range(SIZE), missed)
    time.sleep(0.2)
    beats[2].__exit__()
    time.sleep(1.0)
    assert not missed
    for one in beats[:2]:
        one.__exit__()


@pytest.mark.usefixtures("quick")
def test_one_that_never_began_is_not_missed(store: dist.TCPStore) -> None:
    missed: list[tuple[int, int]] = []
    beats = beating(store, range(2), missed)
    time.sleep(1.0)
    assert not missed
    for one in beats:
        one.__exit__()


def test_only_a_rank_of_the_same_launcher_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    beat = f"3 {os.getpid()} {os.getppid()}".encode()
    heartbeat._continue(beat)
    assert not sent, "no launcher of ours"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("STRETTO_LAUNCHER_PID", str(os.getppid()))
    heartbeat._continue(f"3 {os.getpid()} 1".encode() if os.getppid() != 1 else b"3 1 2")
    assert not sent, "a child of another process"
    heartbeat._continue(beat)
    assert sent == [(os.getpid(), signal.SIGCONT)]
