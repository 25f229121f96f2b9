"""What the kernel says of a process, and whether its rank stands."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time

import pytest

from stretto.tensor.reshard import standing
from stretto.tensor.reshard.process import Traffic, others_work, traffic
from stretto.tensor.reshard.standing import Standing, Waiting, Whereabouts


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", 0))
        listens.listen()
        one = socket.create_connection(listens.getsockname())
        return one, listens.accept()[0]


def carried(but_port: int = 0) -> Traffic:
    found = traffic(but_port)
    assert found is not None
    return found


def test_bytes_that_move_are_seen() -> None:
    one, other = connected()
    with one, other:
        before = carried()
        assert carried() == before
        one.sendall(b"x" * 1000)
        settle(before)
        assert carried().carried_bytes - before.carried_bytes == 2000  # acknowledged here, received there
        port = one.getpeername()[1]
        assert carried(port).carried_bytes == carried().carried_bytes - 2001  # and one for the handshake


def settle(before: Traffic) -> None:
    end = time.monotonic() + 2
    while time.monotonic() < end and carried().carried_bytes - before.carried_bytes < 2000:
        time.sleep(0.01)


def test_bytes_that_do_not_arrive_are_under_way() -> None:
    one, other = connected()
    with one, other:
        assert not carried().under_way
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(b"x" * 100_000)  # until nobody takes more
        time.sleep(0.1)
        assert carried().under_way
        assert not carried(one.getpeername()[1]).under_way


def test_a_thread_at_work_is_seen() -> None:
    done = threading.Event()
    data = bytes(1 << 20)

    def work() -> None:
        while not done.is_set():
            hashlib.sha256(data).digest()  # without Python's lock

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.05)
        assert sum(others_work() for _ in range(20)) >= 18
    finally:
        done.set()
        thread.join()
    assert sum(others_work() for _ in range(20)) <= 2


def work_for(seconds: float) -> None:
    end, data = time.monotonic() + seconds, bytes(1 << 20)
    while time.monotonic() < end:
        hashlib.sha256(data).digest()


def looks(rank: Standing, count: int = 4) -> list[float]:
    found = []
    for _ in range(count):
        found.append(rank.look())
        time.sleep(0.1)
    return found


class Waits:
    """A rank whose reshards are made by another thread than this one, and wait."""

    def __init__(self) -> None:
        self.here = Whereabouts(3, threading.get_ident(), Waiting(4, 1.0, "to receive 8 bytes, rank 1"))
        self.standing = Standing(self.here, 0)


def test_a_rank_that_waits_and_nothing_else_stands() -> None:
    rank = Waits()
    found = looks(rank.standing)
    assert found[0] == 0.0
    assert found[1] < found[2] < found[3]
    assert 0.25 < found[3] < 2.0
    assert rank.standing.episode == 1
    assert rank.standing.text().startswith("waits in reshard number 4 (to receive 8 bytes, rank 1), at ")


def test_whatever_moves_begins_anew() -> None:
    rank = Waits()
    one, other = connected()
    with one, other:
        looks(rank.standing)
        one.sendall(b"x")  # a byte has come
        time.sleep(0.05)
        assert rank.standing.look() == 0.0
        rank.here.waits = Waiting(5, 2.0, "to receive 8 bytes, rank 1")  # another wait
        assert rank.standing.look() == 0.0
        assert looks(rank.standing)[-1] > 0.0
        worker = threading.Thread(target=work_for, args=(0.1,))  # it has worked, though it does not now
        worker.start()
        worker.join()
        assert rank.standing.look() == 0.0
    assert rank.standing.episode >= 4


def test_a_busy_rank_does_not_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Waits()
    rank.here.waits = None  # it is here, in no communication
    assert looks(rank.standing) == [0.0] * 4
    assert "has come to reshard number 3, and stands at " in rank.standing.text()
    rank.here.waits = Waiting(4, 1.0, "")
    for name, answer in (("accelerator_is_used", True), ("others_work", True), ("traffic", None)):
        with monkeypatch.context() as patched:
            patched.setattr(standing, name, lambda *_, answer=answer: answer)
            assert looks(rank.standing, 2) == [0.0, 0.0]
    assert looks(rank.standing, 2)[1] > 0.0


def test_this_process_uses_no_accelerator() -> None:
    assert not standing.accelerator_is_used()
