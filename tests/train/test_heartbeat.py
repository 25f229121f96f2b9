"""A rank that is stopped is missed while its connections stay open; one in a long step is not."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from stretto.train import peers
from stretto.train.failure import enter_phase
from stretto.train.peers import Heartbeat
from stretto.train.world import World

SIZE = 3
LOST_AFTER_S = 0.5


class Clock:
    """A clock that only the test advances, so that a busy machine makes no rank late."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(
        self, seconds: float, store: dist.TCPStore, ranks: range, missed: list[tuple[int, int]]
    ) -> None:
        """In fifths of `LOST_AFTER_S`: each of these ranks beats and looks meanwhile, until one is missed."""
        until_s = self.now_s + seconds
        while self.now_s < until_s and not missed:
            self.now_s += LOST_AFTER_S / 5
            # The first of two beats may have begun before.
            wanted = {rank: beats_of(store, rank) + 2 for rank in ranks}
            ends_s = time.monotonic() + 60
            while not missed and any(beats_of(store, rank) < beats for rank, beats in wanted.items()):
                assert time.monotonic() < ends_s
                time.sleep(0.002)


def beats_of(store: dist.TCPStore, rank: int) -> float:
    key = peers._beat(rank)
    if store.check([peers._ended(rank)]):
        return float("inf")
    return int(store.get(key).split()[0]) if store.check([key]) else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(peers, "time", made)
    monkeypatch.setattr(peers, "BEAT_S", 0.01)
    monkeypatch.setattr(peers, "LOST_AFTER_S", LOST_AFTER_S)
    monkeypatch.setattr(peers, "BEAT_STORE_S", 60.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return made


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )


class Silent:
    def __init__(self, stuck: threading.Event) -> None:
        self.set = lambda *_: stuck.wait(60.0)
        self.check = lambda _: False


def beating(store: dist.TCPStore, ranks: range, missed: list[tuple[int, int]]) -> list[Heartbeat]:
    made = [
        Heartbeat(World(rank, SIZE, SIZE, store), lambda lost, phase, rank=rank: missed.append((rank, lost)))
        for rank in ranks
    ]
    return [one.__enter__() for one in made]


def test_the_rank_before_misses_one_that_stops(store: dist.TCPStore, clock: Clock) -> None:
    missed: list[tuple[int, int]] = []
    beats = beating(store, range(SIZE), missed)
    clock.advance(2 * LOST_AFTER_S, store, range(SIZE), missed)  # a step takes longer, and its rank beats
    assert not missed
    stuck = threading.Event()
    beats[2]._store = Silent(stuck)  # as a stopped process: it neither beats nor parts
    clock.advance(2 * LOST_AFTER_S, store, range(2), missed)
    assert missed == [(1, 2)]
    stuck.set()
    for one in beats:
        one.__exit__()


def test_the_phase_that_the_lost_rank_told_last_is_known(store: dist.TCPStore, clock: Clock) -> None:
    told: list[str] = []
    enter_phase("capturing the model")
    silent = Heartbeat(World(1, 2, 2, store), lambda *_: None).__enter__()
    watching = Heartbeat(World(0, 2, 2, store), lambda _, phase: told.append(phase)).__enter__()
    stuck = threading.Event()
    clock.advance(LOST_AFTER_S / 2, store, range(2), [])
    silent._store = Silent(stuck)
    until_s = time.monotonic() + 60
    while not told:
        assert time.monotonic() < until_s
        clock.now_s += LOST_AFTER_S / 50
        time.sleep(0.005)
    stuck.set()
    silent.__exit__()
    watching.__exit__()
    assert told == ["capturing the model"]


def test_a_rank_that_has_ended_is_not_missed(store: dist.TCPStore, clock: Clock) -> None:
    missed: list[tuple[int, int]] = []
    beats = beating(store, range(SIZE), missed)
    clock.advance(LOST_AFTER_S / 2, store, range(SIZE), missed)
    beats[2].__exit__()
    beats[2]._thread.join()  # type: ignore[union-attr]
    clock.advance(2 * LOST_AFTER_S, store, range(2), missed)
    assert not missed
    for one in beats[:2]:
        one.__exit__()


def test_one_that_never_began_is_not_missed(store: dist.TCPStore, clock: Clock) -> None:
    missed: list[tuple[int, int]] = []
    beats = beating(store, range(2), missed)
    clock.advance(2 * LOST_AFTER_S, store, range(2), missed)
    assert not missed
    for one in beats:
        one.__exit__()
