"""What compute loses to a collective, on a clock of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.measure import contention
from stretto.measure.contention import compute_loss
from stretto.measure.measure_collectives import counted, ends_of

NS = 1000


class Machine:
    """Products take 1000 us, and `slower` times as long while a collective is in flight, which it is for so
    many products."""

    def __init__(self, slower: float, flight_products: int) -> None:
        self.slower = slower
        self.flight_products = flight_products
        self.now = 0
        self.left = 0
        self.started = 0
        self.others = 0
        self.done = threading.Event()

    def clock(self) -> int:
        return self.now

    def mine(self) -> int:
        """The processor time of the computing thread; other threads' is left alone."""
        return self.now if threading.current_thread() is threading.main_thread() else 0

    def process(self) -> int:
        return self.now + self.others

    def multiply(self, *_: Any, **__: Any) -> None:
        if self.left:
            self.now += int(1000 * NS * self.slower)
            self.left -= 1
            if not self.left:
                self.done.set()
                time.sleep(0.004)  # the thread that waits shows it before the next product
        else:
            self.now += 1000 * NS

    def start(self) -> Any:
        self.now += 50 * NS  # the call itself, which is no loss to the transport
        self.started += 1
        self.left = self.flight_products
        done = self.done = threading.Event()

        class Handle:
            wait = staticmethod(done.wait)

        return Handle()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, int], Machine]:
    def make(slower: float, flight_products: int) -> Machine:
        made = Machine(slower, flight_products)
        monkeypatch.setattr(contention.time, "perf_counter_ns", made.clock)
        monkeypatch.setattr(contention.time, "thread_time_ns", made.mine)
        monkeypatch.setattr(contention.time, "process_time_ns", made.process)
        monkeypatch.setattr(contention.torch, "mm", made.multiply)
        return made

    return make


def test_lost_compute_is_counted(machine: Callable[[float, int], Machine]) -> None:
    made = machine(1.5, 20)
    loss = compute_loss(made.start, 50_000.0, lambda us: us, torch.device("cpu"))
    # 20 products in flight lose 500 us each.
    assert loss.processor_us == pytest.approx(20 * 500)
    assert loss.slowdown == 0.0
    assert loss.start_us == pytest.approx(50.0)
    flight = contention.FLIGHT_S * 1e6 / 50_000.0
    faster = compute_loss(machine(0.5, 20).start, 1e5, lambda us: us, torch.device("cpu"))
    assert faster.processor_us == 0.0, "a loss is never negative"
    assert made.started == contention.REPEATS * flight, "0.1 s of collectives of 50 ms, always the same"


def test_a_failing_collective_is_not_passed_over() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        compute_loss(Broken, 1e6, lambda us: us, torch.device("cpu"))


def test_under_a_quota_processor_time_counts_and_not_the_clock(
    machine: Callable[[float, int], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts in periods of the quota, as long as what is lost, is off by a period each time."""
    made = machine(1.25, 20)
    offs = iter([9000, -9000, 7000, -9000, 0, 3000, -7000, 9000, -3000] * 400)
    last = 0

    def clock() -> int:
        nonlocal last
        last = max(last, 2 * made.now + next(offs) * NS)
        return last

    monkeypatch.setattr(contention.time, "perf_counter_ns", clock)
    monkeypatch.setattr(contention, "quota_share", lambda: 0.5)

    def start() -> Any:
        work = made.start()
        made.others += 400 * NS
        return work

    loss = compute_loss(start, 60_000.0, lambda us: us, torch.device("cpu"))
    # 20 products of 250 us more and the others' 400, at half a processor; the call's 50 are no loss.
    assert loss.processor_us == pytest.approx(2 * (20 * 250 + 400), rel=0.08)
    assert loss.start_us == pytest.approx(2 * 50, rel=0.08)


def test_what_each_byte_takes_is_measured_at_a_size_that_tells_it() -> None:
    mb = 2**20
    fast = [(4, 300.0), (2 * mb, 60e3), (4 * mb, 120e3), (8 * mb, 240e3)]
    assert ends_of(fast) == [fast[0], fast[2]], "the largest that is no longer in flight than 0.2 s"
    slow = [(4, 300.0), (4096, 700.0), (2 * mb, 350e3), (4 * mb, 700e3)]
    assert ends_of(slow) == [slow[0], slow[2]], "not 4 kB, whose loss is within the noise"
    assert ends_of([(2048, 350e3), (4096, 700e3)]) == [(2048, 350e3)]
    assert ends_of([(4, 300.0), (4096, 700.0)]) == [(4, 300.0), (4096, 700.0)], "nothing else is sent"


def test_the_member_that_comes_last_has_not_waited_for_others() -> None:
    # Of 10 and 20 us the one has waited for the other for 6 and 14.
    full, start, _ = counted([[(10.0, 1.0), (20.0, 3.0)], [(4.0, 1.0), (6.0, 3.0)]])
    assert (full, start) == pytest.approx((5.0, 2.0))
