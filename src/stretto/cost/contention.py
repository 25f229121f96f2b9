"""What compute loses while communication is in flight, measured by doing both.

    processor    1. The rank multiplies small matrices for as long as a given number of collectives, one after
                    the other, are in flight. The time that it took, less what as many products take alone,
                    was lost to the transport. A collective takes longer meanwhile, too, by its pace.
                 2. The loss is no less than what the process' other threads took of the processor, where the
                    computing thread stood for them. For short collectives this is exact, and 1, a small
                    difference of long times, is not. Where other cores are free, nothing stands.
    accelerator  As many products as last about as long as the collectives, with them and without; the
                 difference is the part of the device's speed that the collectives take.

What is counted is compute that did not get done, so shared cores and quotas need no case of their own. Every
rank of a group must call these together. Touches no file.
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

from stretto.cost.products import products_on, us_each
from stretto.giving_way import lanes_first

ALONE_S = 0.1
"""Length of the compute that is timed alone, before and after. Assumed: ten periods of a control group."""

FLIGHT_S = 0.3
"""How long collectives are kept in flight, if that takes no more than `MOST_COLLECTIVES`. Assumed."""

MOST_COLLECTIVES = 64

REPEATS = 3
"""The median of as many measurements is taken."""


@dataclass(frozen=True, slots=True)
class Loss:
    """processor_us: what one collective takes from each member's compute; slowdown and pace as in
    `stretto.ir.costs.CollectiveCost`."""

    processor_us: float
    slowdown: float
    pace: float


def compute_loss(
    start: Callable[[], Any],
    alone_us: float,
    meet: Callable[[], None],
    device: torch.device,
    calls_us: float = 0.0,
) -> Loss:
    """What this rank's compute loses to a collective.

    start: begins the collective and returns its handle, which has `wait()`; alone_us: how long it takes from
    that call on when nothing else runs, the same number on all ranks; meet: brings the ranks together;
    calls_us: of the call that begins it, which is counted as such and no loss. What the transport does before
    the call returns, because it goes first, is a loss like any other. What a wait has left to do is left out.
    """
    count = max(2, min(MOST_COLLECTIVES, math.ceil(FLIGHT_S * 1e6 / max(alone_us, 1.0))))
    compute = products_on(device)
    with torch.no_grad():
        if device.type == "cpu":
            found = [_beside(start, count, compute, meet, calls_us) for _ in range(REPEATS)]
            lost_us = statistics.median(lost for lost, _ in found)
            beside_us = statistics.median(us for _, us in found)
            return Loss(max(0.0, lost_us), 0.0, min(1.0, alone_us / beside_us))
        slowdowns = [_slowdown(start, count, alone_us, compute, meet, device) for _ in range(REPEATS)]
        return Loss(0.0, min(1.0, max(0.0, statistics.median(slowdowns))), 1.0)


def _beside(
    start: Callable[[], Any],
    count: int,
    compute: Callable[[], None],
    meet: Callable[[], None],
    calls_us: float,
) -> tuple[float, float]:
    """(compute that one of `count` collectives takes away, how long one takes under it), in microseconds."""
    before_us, share_before = _alone(compute, meet)
    # A thread waits, because not every handle of Gloo tells its end to one who only asks (reduce_scatter).
    # It is no part of a step: what it takes, and what asking it takes, is left out.
    with ThreadPoolExecutor(max_workers=1) as waiter:
        waited = -waiter.submit(time.thread_time_ns).result()
        with lanes_first():
            meet()
            begin, mine, process = time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()
            asking = products = 0
            for _ in range(count):
                work = start()
                asked = time.perf_counter_ns()
                done = waiter.submit(work.wait)
                asking += time.perf_counter_ns() - asked
                while not done.done():
                    compute()
                    products += 1
                done.result()
            took_us = (time.perf_counter_ns() - begin) / 1000.0
            mine_us = (time.thread_time_ns() - mine) / 1000.0
            process_us = (time.process_time_ns() - process) / 1000.0
        waited += waiter.submit(time.thread_time_ns).result()
    after_us, share_after = _alone(compute, meet)
    product_us, share = (before_us + after_us) / 2.0, (share_before + share_after) / 2.0
    extra_us = asking / 1000.0 + waited / 1000.0 / share
    others_us = (process_us - mine_us - waited / 1000.0) / share
    missing_us = took_us - extra_us - products * product_us
    stood_us = took_us - extra_us - mine_us / share
    taken_us = others_us if stood_us > others_us / 2.0 else 0.0
    # Its end is seen when a product ends, half of one late.
    beside_us = max(1.0, (took_us - extra_us) / count - product_us / 2.0)
    return max(missing_us / count - calls_us, taken_us / count), beside_us


def _alone(compute: Callable[[], None], meet: Callable[[], None]) -> tuple[float, float]:
    """(a product's time in microseconds, the share of a processor that the thread has), while all ranks do
    nothing but compute."""
    meet()
    begin, mine = time.perf_counter_ns(), time.thread_time_ns()
    product_us = us_each(compute, ALONE_S * 1e6)
    took_ns = time.perf_counter_ns() - begin
    return product_us, min(1.0, (time.thread_time_ns() - mine) / took_ns)


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
