"""What compute loses while communication is in flight, measured by doing both.

    processor    The rank computes for as long as a given number of collectives, one after the other, are in
                 flight: the ops of the step, if they are known (`compute_loop`), else small products.
                 1. Under a quota, and on a core that hosts share, what counts is processor time: the
                    process' in flight less what as much work takes alone. It holds the transport's threads,
                    and is no less than they took, and what its packets and copies make ops slower by. A
                    clock would count in whole periods of the quota, or turns of the others, which are as
                    long as what is lost.
                 2. Elsewhere the time by the clock counts, less what as much work takes alone, and no less
                    than what the process' other threads took, where the computing thread stood for them.
                    Where other cores are free, nothing stands.
                 The machine has another speed every few seconds: work is timed alone before and after each
                 flight.
                 Whenever a transport's thread has had the core, an op finds the caches changed. Measured with
                 four hosts of half a core, all-reducing at 70 Mbit/s: products of 192 rows and columns take
                 as long as alone, those of 256 rows and 4096 columns 11 % longer, element-wise ops of 4 MB
                 16 to 28 %, forward and backward of a block 10 to 30 %.
    accelerator  As many products as last about as long as the collectives, with them and without; the
                 difference is the part of the device's speed that the collectives take.

What is counted is compute that did not get done. Every rank of a group must call these together. Touches no
file.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from stretto.backend.idle_class import lanes_first
from stretto.processor.core_share import has_quota, part_of
from stretto.processor.products import products_on

ALONE_S = 0.2
"""Length of the compute that is timed alone, before and after. Assumed: many ops, and twenty periods of a
control group."""

FLIGHT_S = 0.3
"""How long collectives are kept in flight, if that takes no more than `MOST_COLLECTIVES`. Assumed."""

MOST_COLLECTIVES = 64

REPEATS = 5
"""The median of as many measurements is taken."""

SLOW_US = 80_000.0
"""Of a transfer that takes so long alone, `SLOW_REPEATS` measurements are taken; the limit is assumed.
Compute loses a few hundredths of such a time. With four hosts of half a core at 76 Mbit/s, whose speeds were
unsteady by 12 %, the median of 5 said in one run of four that all-reduces of 2 MB take nothing, instead of
6 ms for each megabyte."""

SLOW_REPEATS = 15
"""Assumed: three times as many."""


@dataclass(frozen=True, slots=True)
class Loss:
    """processor_us: what one collective takes from each member's compute, beside start_us: the call that
    begins it, as its thread computes (0 on an accelerator); slowdown as in `ir.costs.CollectiveCost`."""

    processor_us: float
    slowdown: float
    start_us: float = 0.0


Compute = Callable[[], float]
"""Does some work, a few milliseconds of it at most, or one op, and says how much it was, in any unit."""


def compute_loss(
    start: Callable[[], Any],
    alone_us: float,
    meet: Callable[[], None],
    device: torch.device,
    compute: Compute | None = None,
) -> Loss:
    """What this rank's compute loses to a collective, or to whatever else is under way.

    start: begins the collective and returns its handle, which has `wait()`; alone_us: how long it takes from
    that call on when nothing else runs, the same number on all ranks; meet: brings the ranks together;
    compute: what a processor computes meanwhile, products if nothing is known. What the transport does before
    the call returns, because it goes first, is a loss like any other. What a wait has left to do is left out.

    The call is timed here, among ops and with ranks that come apart: of two ranks that started an all-gather
    of 256 KiB at one time each called for 390 us, and in the steps of another run for 190.
    """
    count = max(2, min(MOST_COLLECTIVES, math.ceil(FLIGHT_S * 1e6 / max(alone_us, 1.0))))
    with torch.no_grad():
        if device.type == "cpu":
            compute = compute or _products(device)
            found = []
            before = _alone(compute, meet)
            limited = has_quota() or before.part < 1.0
            for _ in range(REPEATS if alone_us < SLOW_US else SLOW_REPEATS):
                flight = _flight(start, count, compute, meet)
                after = _alone(compute, meet)
                found.append(_lost(flight, before.mean(after), limited))
                before = after
            lost_us, start_us = (statistics.median(times) for times in zip(*found, strict=True))
            return Loss(max(0.0, lost_us), 0.0, start_us)
        product = products_on(device)
        slowdowns = [_slowdown(start, count, alone_us, product, meet, device) for _ in range(REPEATS)]
        return Loss(0.0, min(1.0, max(0.0, statistics.median(slowdowns))))


def _products(device: torch.device) -> Compute:
    """One product after the other, each counted as one."""
    product = products_on(device)

    def compute() -> float:
        product()
        return 1.0

    return compute


@dataclass(frozen=True, slots=True)
class _Alone:
    """Work while all ranks do nothing else: what one unit of it takes by the clock, of the computing thread,
    and of the process, in microseconds."""

    clock_us: float
    thread_us: float
    process_us: float

    @property
    def part(self) -> float:
        """Of a processor that the thread had."""
        return part_of(self.thread_us, self.clock_us)

    def mean(self, other: _Alone) -> _Alone:
        return _Alone(
            (self.clock_us + other.clock_us) / 2.0,
            (self.thread_us + other.thread_us) / 2.0,
            (self.process_us + other.process_us) / 2.0,
        )


@dataclass(frozen=True, slots=True)
class _Flight:
    """`collectives` one after the other, and the `work` done meanwhile, in its units: the time in all, and
    what was taken of the computing thread, in its calls as
    well, and of the process. What waiting for the collectives took is left out."""

    collectives: int
    work: float
    took_us: float
    thread_us: float
    calls_us: float
    process_us: float


def _lost(flight: _Flight, alone: _Alone, limited: bool) -> tuple[float, float]:
    """(compute that one collective takes away, what its call takes), in microseconds."""
    # A thread that shares its core with other processes is as much slower than its processor time says.
    stretch = alone.clock_us / alone.thread_us
    calls_us = flight.calls_us / flight.collectives * stretch
    helpers_us = flight.work * (alone.process_us - alone.thread_us)
    others_us = flight.process_us - flight.thread_us - helpers_us
    if limited:
        taken_us = max(others_us + flight.calls_us, flight.process_us - flight.work * alone.process_us)
        return taken_us * alone.clock_us / alone.process_us / flight.collectives - calls_us, calls_us
    others_us *= stretch
    stalled_us = flight.took_us - flight.thread_us * stretch
    lost_us = (flight.took_us - flight.work * alone.clock_us) / flight.collectives - calls_us
    if stalled_us > others_us / 2.0:
        lost_us = max(lost_us, others_us / flight.collectives)
    return lost_us, calls_us


def _flight(start: Callable[[], Any], count: int, compute: Compute, meet: Callable[[], None]) -> _Flight:
    """Work for as long as `count` collectives, one after the other, are in flight."""
    # A thread waits, because not every handle of Gloo tells its end to one who only asks (reduce_scatter).
    # It is no part of a step: what it takes, and what asking it takes, is left out.
    with ThreadPoolExecutor(max_workers=1) as waiter:
        waited = -waiter.submit(time.thread_time_ns).result()
        with lanes_first():
            meet()
            begin = _clocks()
            asking = calling = 0
            work_done = 0.0
            for _ in range(count):
                called = time.thread_time_ns()
                work = start()
                asked = time.thread_time_ns()
                calling += asked - called
                done = waiter.submit(work.wait)
                asking += time.thread_time_ns() - asked
                while not done.done():
                    work_done += compute()
                done.result()
            took, mine, process = (now - then for now, then in zip(_clocks(), begin, strict=True))
        waited += waiter.submit(time.thread_time_ns).result()
    return _Flight(
        count,
        work_done,
        (took - asking - waited) / 1e3,
        (mine - asking) / 1e3,
        calling / 1e3,
        (process - asking - waited) / 1e3,
    )


def _alone(compute: Compute, meet: Callable[[], None]) -> _Alone:
    """Work while all ranks do nothing but compute."""
    meet()
    with lanes_first():
        compute()
        begin = _clocks()
        work, until = 0.0, begin[0] + ALONE_S * 1e9
        while time.perf_counter_ns() < until:
            work += compute()
        took, mine, process = (now - then for now, then in zip(_clocks(), begin, strict=True))
    return _Alone(took / 1e3 / work, mine / 1e3 / work, process / 1e3 / work)


def _clocks() -> tuple[int, int, int]:
    """Now, the time that this thread has computed, and that the process has; in nanoseconds."""
    return time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()


def _slowdown(
    start: Callable[[], Any],
    count: int,
    alone_us: float,
    compute: Callable[[], None],
    meet: Callable[[], None],
    device: torch.device,
) -> float:
    """Share of compute speed lost while collectives are in flight on an accelerator."""

    def timed(products: int, collectives: int) -> float:
        meet()
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
