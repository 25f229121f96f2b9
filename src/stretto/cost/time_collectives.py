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

MOST_ROUNDS = 24
"""Of a size whose rounds are short."""

ROUNDS_US = 100_000.0
"""Rounds of a size go on for this long, within the limits above."""

COMPUTE_PARTS = (0.35, 1.07, 0.6, 1.46, 0.82, 1.7)
"""Of it in the rounds, in turn, with a mean of 1: no round always meets the same part of a period."""

KEPT = 0.75
"""Part of the rounds that count, the faster ones: what is beyond was other work on the machine. Assumed."""

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
    start: Callable[[], Any], group: dist.ProcessGroup, device: torch.device, compute_us: float
) -> tuple[float, float, float]:
    """Step 2: (microseconds of one collective after its start, of its start, spread), equal on all ranks."""
    took: list[float] = []
    starts: list[float] = []

    def one() -> float:
        # The collective before it brought the ranks together, as in a step; a barrier would let them go one
        # after the other, and a short collective would cost what the barrier does.
        if device.type == "cpu":
            _compute(compute_us * COMPUTE_PARTS[len(took) % len(COMPUTE_PARTS)])
        begin = time.perf_counter_ns()
        work = start()
        started = time.perf_counter_ns()
        work.wait()
        _synchronise(device)
        end = time.perf_counter_ns()
        took.append((end - started) / 1000.0)
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
    rounds: dict[tuple[int, ...], list[list[float]]] = {}
    for ranks, times, _ in told:
        rounds.setdefault(tuple(ranks), []).append(times)
    of_groups = [_faster([statistics.fmean(each) for each in zip(*times)]) for times in rounds.values()]
    start_us = statistics.median(us for _, _, calls in told for us in calls)
    return (
        statistics.median(statistics.fmean(half) for half in of_groups),
        start_us,
        max((half[-1] - half[0]) / statistics.fmean(half) for half in of_groups),
    )


def _faster(times_us: Sequence[float]) -> list[float]:
    """The rounds that count, ascending."""
    return sorted(times_us)[: max(1, round(KEPT * len(times_us)))]


def _compute(us: float) -> None:
    """Keep this rank's processor busy."""
    factor = torch.full((192, 192), 0.01)
    end = time.perf_counter_ns() + int(us * 1e3)
    while time.perf_counter_ns() < end:
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
