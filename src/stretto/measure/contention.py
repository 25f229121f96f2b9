"""What compute loses while communication is in flight, measured by doing both.

    processor    Products are computed for as long as a number of collectives, one after the other, are in
                 flight; what as much work takes alone, just before and after, is taken off. Under a quota the
                 process' time counts and not the clock, which counts in full periods.
    accelerator  As many products as last about as long as the collectives, with them and without; the
                 difference is the part of the device's speed that the collectives take.

What is counted is compute that did not get done. Every rank of a group must call these together. Touches no
file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from stretto.backend.gloo_adapter import lanes_first
from stretto.measure.stopwatch import repeats
from stretto.processor.quota import products_on, quota_share

Calls = Callable[[], Any]
"""Begins, computes or waits."""

Meet = Callable[[float], float]
"""Brings the ranks together, and gives the most that one of them says, the same number on all."""

FLIGHT_S = 0.1
"""How long collectives are kept in flight, if that takes no more than `MOST_COLLECTIVES`. Assumed."""

MOST_COLLECTIVES = 64

FIRST_COLLECTIVES = 8
"""In flight in the first measurement, at most: it shows how long one takes beside compute. On cores that
others share that is up to ten times as long as alone. Assumed."""

ALONE_S = 0.05
"""Length of the compute that is timed alone, before and after. Assumed: tens of products; both together are
as long as a flight."""

UNDER_QUOTA = 4.0
"""Times as long for both under a quota. Assumed: tens of its periods, which are 10 to 100 ms long."""

REPEATS = 4
"""The median of as many measurements is taken. Assumed."""


@dataclass(frozen=True, slots=True)
class Loss:
    """processor_us: what one collective takes from each member's compute, besides start_us: the call that
    begins it, as its thread computes (0 on an accelerator); slowdown as in `ir.costs.CollectiveCost`."""

    processor_us: float
    slowdown: float
    start_us: float = 0.0


def compute_loss(start: Calls, alone_us: float, meet: Meet, device: torch.device) -> Loss:
    """What this rank's compute loses to a collective, or to whatever else is under way. start: begins the
    collective and returns its handle, which has `wait()`; alone_us: how long it takes from that call on when
    nothing else runs, the same number on all ranks. What a wait has left to do is left out."""
    longer = UNDER_QUOTA if quota_share() < 1.0 else 1.0
    count = repeats(alone_us, longer * FLIGHT_S * 1e6, 2, MOST_COLLECTIVES)
    product = products_on(device)
    with torch.no_grad():
        if device.type != "cpu":
            slowdowns = [_slowdown(start, count, alone_us, product, meet, device) for _ in range(REPEATS)]
            return Loss(0.0, min(1.0, max(0.0, statistics.median(slowdowns))))
        lost: list[tuple[float, float]] = []
        before = _alone(product, meet, longer * ALONE_S)
        count = min(count, FIRST_COLLECTIVES)
        for _ in range(REPEATS):
            flight = _flight(start, count, product, meet)
            one_us = max(alone_us, meet(flight.clock_us / count))
            after = _alone(product, meet, longer * ALONE_S)
            lost.append(_lost(flight, count, before, after))
            before, count = after, repeats(one_us, longer * FLIGHT_S * 1e6, 2, MOST_COLLECTIVES)
        loss_us, start_us = map(statistics.median, zip(*lost, strict=True))
        return Loss(max(0.0, loss_us), 0.0, start_us)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some products, and what they and all that went on meanwhile took: by the clock, of the process, and of
    the computing thread in calls that start a collective."""

    products: int
    clock_us: float
    process_us: float
    calls_us: float = 0.0


def _lost(flight: _Stretch, collectives: int, before: _Stretch, after: _Stretch) -> tuple[float, float]:
    """(compute that one collective takes away, what its call takes), in microseconds."""
    products = before.products + after.products
    clock_us, process_us = before.clock_us + after.clock_us, before.process_us + after.process_us
    stopped = clock_us / process_us if quota_share() < 1.0 else 1.0
    took_us = flight.process_us * stopped if stopped != 1.0 else flight.clock_us
    calls_us = flight.calls_us * stopped / collectives
    return (took_us - flight.products * clock_us / products) / collectives - calls_us, calls_us


def _flight(start: Calls, count: int, product: Calls, meet: Meet) -> _Stretch:
    """Work for as long as `count` collectives, one after the other, are in flight."""
    # A thread waits, because not every handle of Gloo shows its end to one who only asks (reduce_scatter).
    # It is no part of a step: what it takes, and what asking it takes, is left out.
    with ThreadPoolExecutor(max_workers=1) as waiter:
        waited = -waiter.submit(time.thread_time_ns).result()
        with lanes_first():
            meet(0.0)
            begin, process = time.perf_counter_ns(), time.process_time_ns()
            asking = calling = products = 0
            for _ in range(count):
                called = time.thread_time_ns()
                work = start()
                asked = time.thread_time_ns()
                calling += asked - called
                done = waiter.submit(work.wait)
                asking += time.thread_time_ns() - asked
                while not done.done():
                    product()
                    products += 1
                done.result()
            took, mine = time.perf_counter_ns() - begin, time.process_time_ns() - process
        waited += waiter.submit(time.thread_time_ns).result()
    left_out = asking + waited
    return _Stretch(products, (took - left_out) / 1e3, (mine - left_out) / 1e3, calling / 1e3)


def _alone(product: Calls, meet: Meet, seconds: float) -> _Stretch:
    meet(0.0)
    with lanes_first():
        product()
        begin, process = time.perf_counter_ns(), time.process_time_ns()
        products = 0
        while time.perf_counter_ns() - begin < seconds * 1e9:
            product()
            products += 1
        took, mine = time.perf_counter_ns() - begin, time.process_time_ns() - process
    return _Stretch(products, took / 1e3, mine / 1e3)


def _slowdown(
    start: Calls, count: int, alone_us: float, compute: Calls, meet: Meet, device: torch.device
) -> float:
    def timed(products: int, collectives: int) -> float:
        meet(0.0)
        torch.cuda.synchronize(device)
        begin = time.perf_counter_ns()
        works = [start() for _ in range(collectives)]
        for _ in range(products):
            compute()
        torch.cuda.current_stream(device).synchronize()
        took_us = (time.perf_counter_ns() - begin) / 1000.0
        for work in works:
            work.wait()
        torch.cuda.synchronize(device)
        return took_us

    timed(4, 0)
    one_us = timed(16, 0) / 16
    # Two thirds of the flight, so that collectives are under way until the last product.
    products = max(4, int(count * alone_us * 2 / 3 / one_us))
    alone, together = timed(products, 0), timed(products, count)
    return 1.0 - alone / together if together > alone else 0.0
