"""What compute loses to a collective, on a clock of the test's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.cost import contention
from stretto.cost.contention import compute_loss

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
        self.done = threading.Event()

    def clock(self) -> int:
        return self.now

    def multiply(self, *_: Any, **__: Any) -> None:
        if self.left:
            self.now += int(1000 * NS * self.slower)
            self.left -= 1
            if not self.left:
                self.done.set()
                time.sleep(0.004)  # the thread that waits tells it before the next product
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
        monkeypatch.setattr(contention.torch, "mm", made.multiply)
        return made

    return make


def test_lost_compute_is_counted_for_each_megabyte(machine: Callable[[float, int], Machine]) -> None:
    made = machine(1.5, 20)
    loss = compute_loss(made.start, 2_000_000, 50_000.0, lambda: None, torch.device("cpu"), 50.0)
    # 20 products in flight lose 500 us each, for 2 MB.
    assert loss.processor_us_per_mb == pytest.approx(20 * 500 / 2)
    assert loss.slowdown == 0.0
    assert made.started == contention.REPEATS * 6, "0.3 s of collectives of 50 ms"


def test_a_transport_that_takes_nothing_loses_nothing(machine: Callable[[float, int], Machine]) -> None:
    made = machine(1.0, 5)
    loss = compute_loss(made.start, 1_000_000, 1000.0, lambda: None, torch.device("cpu"), 50.0)
    assert loss.processor_us_per_mb == pytest.approx(0.0)
    assert made.started == contention.REPEATS * contention.MOST_COLLECTIVES


def test_a_loss_is_never_negative(machine: Callable[[float, int], Machine]) -> None:
    loss = compute_loss(machine(0.5, 20).start, 10**6, 1e5, lambda: None, torch.device("cpu"), 50.0)
    assert loss.processor_us_per_mb == 0.0


def test_a_failing_collective_is_not_passed_over() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        compute_loss(Broken, 1000, 1e6, lambda: None, torch.device("cpu"))


def test_a_collective_that_takes_longer_under_compute_has_a_pace(
    machine: Callable[[float, int], Machine],
) -> None:
    loss = compute_loss(machine(1.0, 40).start, 10**6, 20_000.0, lambda: None, torch.device("cpu"), 50.0)
    # 40 products of 1 ms, where 20 ms are enough alone; its end is seen half a product late on average.
    assert loss.pace == pytest.approx(20 / 39.5)
    assert (
        compute_loss(machine(1.0, 5).start, 10**6, 2e4, lambda: None, torch.device("cpu"), 50.0).pace == 1.0
    )
