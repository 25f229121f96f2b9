"""A rank that is stopped is missed while its connections stay open; one in a long step is not."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from stretto.train import peers
from stretto.train.failure import enter_phase
from stretto.train.peers import BEAT_S, LOST_AFTER_S, Heartbeat, Neighbour
from stretto.train.world import World

HOUR_S = 3600.0


def looks(neighbour: Neighbour, beat: bytes, from_s: float, to_s: float, ended: bool = False) -> list[float]:
    """When it is lost, of looks every `BEAT_S` that see the same beat."""
    times = [from_s + BEAT_S * n for n in range(int((to_s - from_s) / BEAT_S) + 1)]
    return [time_s for time_s in times if neighbour.is_lost(beat, ended, time_s, time_s)]


def test_a_rank_is_lost_when_its_beats_stop() -> None:
    neighbour = Neighbour(0.0)
    for number in range(100):  # a step takes longer, and its rank beats
        assert not neighbour.is_lost(b"%d training" % number, False, BEAT_S * number, BEAT_S * number)
    last_s = BEAT_S * 99
    assert (
        looks(neighbour, neighbour.beat, last_s + BEAT_S, last_s + 60.0)[0] == last_s + LOST_AFTER_S + BEAT_S
    )


@pytest.mark.parametrize(("beat", "ended"), [(b"7 training", True), (b"", False)], ids=["ended", "not begun"])
def test_a_rank_that_has_ended_or_not_begun_is_not_missed(beat: bytes, ended: bool) -> None:
    assert looks(Neighbour(0.0), beat, 0.0, HOUR_S, ended) == []


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
    store.set(peers._beat(1), "1 capturing the model")  # and no other
    lost: list[tuple[int, str]] = []
    reported = threading.Event()

    def report(rank: int, phase: str) -> None:
        lost.append((rank, phase))
        reported.set()

    enter_phase("planning")
    with Heartbeat(World(0, 2, 2, store), report):
        assert reported.wait(60.0)
    assert lost == [(1, "capturing the model")]
    assert store.get(peers._beat(0)).endswith(b" planning")
    assert store.get(peers._ended(0)) == b"1"
