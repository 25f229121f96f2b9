"""How long one collective takes: with and without compute before it, and what its wait does at the end.

The rounds of step 2 of `cost.measure_collectives`, and what brings the measuring ranks together. Every
function here is called by all ranks at once, and gives all of them one figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from stretto.giving_way import lanes_first

ROUNDS = 12
"""Counted rounds of a size after two for warmth, when they take long."""

MOST_ROUNDS = 30
"""Of a size whose rounds are short."""

ROUNDS_US = 100_000.0
"""Rounds of a size go on for this long, within the limits above."""

COMPUTE_PARTS = (0.35, 1.07, 0.6, 1.46, 0.82, 1.7)
"""Of it in the rounds, in turn, with a mean of 1: no round always meets the same part of a period."""

KEPT = 0.9
"""Part of the rounds that count, the faster ones. A step has hundreds of collectives, and in every step some
meet ranks that are late; what is beyond this part was other work on the machine. Assumed."""

ALONE_US = 100_000.0
"""Length of the compute that tells how fast a rank is."""

FINISH_ROUNDS = 5
SURELY_US = 2_000.0
"""A collective is surely done after twice its time alone and this. Assumed."""


def finish_us(start: Callable[[], Any], alone_us: float) -> float:
    """What waiting takes for a collective that is done, in microseconds, equal on all ranks."""
    took: list[float] = []
    for _ in range(FINISH_ROUNDS):
        work = start()
        time.sleep((2.0 * alone_us + SURELY_US) / 1e6)
        begin = time.perf_counter_ns()
        work.wait()
        took.append((time.perf_counter_ns() - begin) / 1000.0)
    return agree_median(statistics.median(took))


def timed(
    start: Callable[[], Any], group: dist.ProcessGroup, device: torch.device, products: float
) -> tuple[float, float, float]:
    """Step 2: (microseconds of one collective from its call on, of that call, spread), equal on all ranks.

    products: what a rank computes before each, on average. The same work on all ranks, however long it takes
    them: that they are not ready at one time is a part of what a collective costs.
    """
    took: list[float] = []
    starts: list[float] = []

    def one() -> float:
        # The collective before it brought the ranks together, as in a step; a barrier would let them go one
        # after the other, and a short collective would cost what the barrier does.
        if device.type == "cpu":
            _compute(round(products * COMPUTE_PARTS[len(took) % len(COMPUTE_PARTS)]))
        begin = time.perf_counter_ns()
        work = start()
        started = time.perf_counter_ns()
        work.wait()
        _synchronise(device)
        end = time.perf_counter_ns()
        took.append((end - begin) / 1000.0)
        starts.append((started - begin) / 1000.0)
        return took[-1]

    meet(device)
    with lanes_first() if device.type == "cpu" else nullcontext():
        one()
        warm_us = agree_max(one(), device)
        one()
        took.clear()
        starts.clear()
        for _ in range(int(min(MOST_ROUNDS, max(ROUNDS, ROUNDS_US / max(warm_us, 1.0))))):
            one()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (dist.get_process_group_ranks(group), took, starts))
    by_group: dict[tuple[int, ...], list[tuple[list[float], list[float]]]] = {}
    for ranks, wholes, calls in told:
        by_group.setdefault(tuple(ranks), []).append((wholes, calls))
    found = [_counted(members) for members in by_group.values()]
    return (
        statistics.median(whole_us for whole_us, _, _ in found),
        statistics.median(start_us for _, start_us, _ in found),
        max(spread for _, _, spread in found),
    )


def _counted(members: Sequence[tuple[list[float], list[float]]]) -> tuple[float, float, float]:
    """(whole, start, spread) of one group from its members' times: means over members, and over the rounds
    that count, which are those that took the least."""
    wholes = [statistics.fmean(each) for each in zip(*(wholes for wholes, _ in members), strict=True)]
    starts = [statistics.fmean(each) for each in zip(*(starts for _, starts in members), strict=True)]
    rounds = sorted(zip(wholes, starts, strict=True))[: max(1, round(KEPT * len(wholes)))]
    whole_us = statistics.fmean(whole for whole, _ in rounds)
    range_us = max(whole for whole, _ in rounds) - min(whole for whole, _ in rounds)
    return whole_us, statistics.fmean(start for _, start in rounds), range_us / whole_us


def products_per_us(device: torch.device) -> float:
    """How much of what `timed` computes a rank does in a microsecond, the median of ranks that all compute at
    once; 0 on an accelerator, where no compute goes before a collective."""
    if device.type != "cpu":
        return 0.0
    _compute(4)
    meet(device)
    begin = time.perf_counter_ns()
    products = 0
    while time.perf_counter_ns() - begin < ALONE_US * 1e3:
        _compute(4)
        products += 4
    return agree_median(products * 1e3 / (time.perf_counter_ns() - begin))


def _compute(products: int) -> None:
    """Keep this rank's processor busy."""
    factor = torch.full((192, 192), 0.01)
    for _ in range(products):
        torch.mm(factor, factor)


def meet(device: torch.device) -> None:
    """Bring all ranks together."""
    if device.type == "cuda":
        # A barrier of its own would pick a device by rank; the sum of one number keeps to this one.
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    else:
        dist.barrier()


def agree_max(value: float, device: torch.device) -> float:
    told = torch.tensor([value], dtype=torch.float32, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told.item())


def agree_median(value: float) -> float:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return float(statistics.median(told))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
