"""How long one collective takes, and what it leaves to the thread that computes.

The rounds of `measure.measure_collectives`, and what brings the measuring ranks together. Every function here
is called by all ranks at once, and gives all of them one figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stretto.backend.device_time import synchronise
from stretto.backend.idle_class import lanes_first
from stretto.processor.products import products_on
from stretto.processor.quota import quota_share

ROUNDS = 12
"""Counted rounds of a size after two for warmth, when they take long."""

MOST_ROUNDS = 30
"""Of a size whose rounds are short."""

ROUNDS_US = 100_000.0
"""Rounds of a size go on for this long, within the limits above."""

KEPT = 0.9
"""Part of the rounds that count, the faster ones: what is beyond was other work on the machine. Assumed."""

CALL_ROUNDS = 6
"""Counted rounds of the wait for a collective that is done, after two for warmth."""

SURELY_US = 2_000.0
"""A collective is surely done after twice its time alone and this. Assumed."""

_Told = TypeVar("_Told")


def tell(value: _Told) -> list[_Told]:
    """What every running rank says, by rank; of a process alone, what it says itself."""
    told = [value]
    if dist.is_initialized():
        told *= dist.get_world_size()
        dist.all_gather_object(told, value)
    return told


def agree_median(value: float) -> float:
    return float(statistics.median(tell(value)))


def meet(device: torch.device) -> None:
    """Bring all ranks together."""
    if device.type == "cuda":
        # A barrier of its own would pick a device by rank; the sum of one number keeps to this one.
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    else:
        dist.barrier()


def timed_end(start: Callable[[], Any], result: torch.Tensor, alone_us: float) -> tuple[float, float]:
    """(wait, finish): microseconds on the thread that computes, of the wait for a collective that compute has
    hidden, and with it how much longer its result is read for the first time than for the second.

    result: what the collective writes. The thread's time is counted: what a transport's own threads take of
    the core is a loss (`measure.contention`), wherever it falls.
    """
    compute = products_on(result.device)
    copy = torch.empty_like(result)
    rounds: list[tuple[float, float]] = []
    with torch.no_grad(), lanes_first():
        for _ in range(CALL_ROUNDS + 2):
            work = start()
            end_ns = time.perf_counter_ns() + (2.0 * alone_us + SURELY_US) * 1e3
            while time.perf_counter_ns() < end_ns:
                compute()
            at = [time.thread_time_ns()]
            work.wait()
            at.append(time.thread_time_ns())
            for _ in range(2):
                copy.copy_(result)
                at.append(time.thread_time_ns())
            wait, first, second = (1e-3 * (end - begin) / quota_share() for begin, end in pairwise(at))
            rounds.append((wait, first - second))
    wait_us, read_us = (max(0.0, agree_median(statistics.median(of))) for of in zip(*rounds[2:], strict=True))
    return wait_us, wait_us + read_us


def timed(
    start: Callable[[], Any], group: dist.ProcessGroup, device: torch.device
) -> tuple[float, float, float]:
    """(microseconds of one collective from its call on, of that call, spread), equal on all ranks: the median
    of groups. One follows the other, as on a lane that is never idle: what an idle link lets through at once
    (a token bucket's content) is not counted on."""
    took: list[tuple[float, float]] = []

    def one() -> float:
        begin = time.perf_counter_ns()
        work = start()
        started = time.perf_counter_ns()
        work.wait()
        synchronise(device)
        took.append(((time.perf_counter_ns() - begin) / 1000.0, (started - begin) / 1000.0))
        return took[-1][0]

    meet(device)
    with lanes_first() if device.type == "cpu" else nullcontext():
        one()
        warm_us = max(tell(one()))
        one()
        took.clear()
        for _ in range(int(min(MOST_ROUNDS, max(ROUNDS, ROUNDS_US / max(warm_us, 1.0))))):
            one()
    by_group: dict[tuple[int, ...], list[list[tuple[float, float]]]] = {}
    for ranks, rounds in tell((dist.get_process_group_ranks(group), took)):
        by_group.setdefault(tuple(ranks), []).append(rounds)
    whole_us, start_us, spread = zip(*map(counted, by_group.values()), strict=True)
    return statistics.median(whole_us), statistics.median(start_us), max(spread)


def counted(members: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """(whole, start, spread) of one group from its members' (whole, start) of each round: the whole is that
    of the member that comes last and has not waited for others (`Costs.skew` says by how much members come
    late), the start a mean; means over the rounds that count, which are those that took the least."""
    rounds = sorted(
        (min(whole for whole, _ in each), statistics.fmean(start for _, start in each))
        for each in zip(*members, strict=True)
    )
    wholes, starts = zip(*rounds[: max(1, round(KEPT * len(rounds)))], strict=True)
    whole_us = statistics.fmean(wholes)
    return whole_us, statistics.fmean(starts), (max(wholes) - min(wholes)) / whole_us
