"""How long one collective takes: with and without compute before it, and on the thread that computes.

The rounds of step 2 of `cost.measure_collectives`, and what brings the measuring ranks together. Every
function here is called by all ranks at once, and gives all of them one figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from stretto.backend.idle_class import lanes_first
from stretto.backend.synchronise import synchronise
from stretto.processor.core_share import pace_alone
from stretto.processor.products import products_on

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

CALL_ROUNDS = 12
"""Counted rounds of the wait for a collective after two for warmth, if they take no more than this:"""

CALL_ROUNDS_US = 1_000_000.0
LEAST_CALL_ROUNDS = 4

SURELY_US = 2_000.0
"""A collective is surely done after twice its time alone and this. Assumed."""


@dataclass(frozen=True, slots=True)
class End:
    """Microseconds on the thread that computes: of the wait for a collective that is done, and how much
    longer its result is read for the first time than for the second."""

    wait_us: float
    read_us: float


def timed_end(start: Callable[[], Any], result: torch.Tensor, alone_us: float, part: float) -> End:
    """What a collective that compute has hidden leaves to the thread that computes, equal on all ranks.

    result: what the collective writes; part: of a processor that the thread has (`processor.core_share`).

    The thread's time is counted, and taken for as long as it has its part. A quota, or a neighbour's turn,
    stops it for milliseconds within one wait of ten; and what a transport's own threads take of the core is a
    loss (`cost.contention`), wherever it falls. By the clock a GPT's calls were priced at 27 ms of a
    microbatch's 174, in which their thread computed for 17.
    """
    compute = products_on(result.device)
    copy = torch.empty_like(result)
    rounds: list[tuple[float, float]] = []
    surely_us = 2.0 * alone_us + SURELY_US
    count = max(LEAST_CALL_ROUNDS, min(CALL_ROUNDS, round(CALL_ROUNDS_US / surely_us)))
    with torch.no_grad(), lanes_first():
        for _ in range(count + 2):
            work = start()
            _compute_for(compute, surely_us)
            at = [time.thread_time_ns()]
            work.wait()
            at.append(time.thread_time_ns())
            for _ in range(2):
                copy.copy_(result)
                at.append(time.thread_time_ns())
            wait, first, second = (1e-3 * (end - begin) / part for begin, end in pairwise(at))
            rounds.append((wait, first - second))

    def mean(times: Iterable[float]) -> float:
        counted = sorted(times)[: max(1, round(KEPT * count))]
        return max(0.0, agree_median(statistics.fmean(counted)))

    return End(*(mean(times) for times in zip(*rounds[2:], strict=True)))


def _compute_for(compute: Callable[[], None], us: float) -> None:
    end = time.perf_counter_ns() + us * 1e3
    while time.perf_counter_ns() < end:
        compute()


def timed(
    start: Callable[[], Any],
    group: dist.ProcessGroup,
    device: torch.device,
    products: float,
    lateness: bool,
) -> tuple[float, float, float]:
    """Step 2: (microseconds of one collective from its call on, of that call, spread), equal on all ranks.

    products: what a rank computes before each, on average. The same work on all ranks, however long it takes
    them. lateness: that they are not ready at one time is a part of what the collective costs: what it takes
    its members on average. Else it is what it takes the member that comes last.
    """
    took: list[float] = []
    starts: list[float] = []
    compute = products_on(device) if products else None

    def one() -> float:
        # The collective before it brought the ranks together, as in a step; a barrier would let them go one
        # after the other, and a short collective would cost what the barrier does.
        if compute is not None:
            for _ in range(round(products * COMPUTE_PARTS[len(took) % len(COMPUTE_PARTS)])):
                compute()
        begin = time.perf_counter_ns()
        work = start()
        started = time.perf_counter_ns()
        work.wait()
        synchronise(device)
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
    found = [_counted(members, lateness) for members in by_group.values()]
    return (
        statistics.median(whole_us for whole_us, _, _ in found),
        statistics.median(start_us for _, start_us, _ in found),
        max(spread for _, _, spread in found),
    )


def _counted(
    members: Sequence[tuple[list[float], list[float]]], lateness: bool
) -> tuple[float, float, float]:
    """(whole, start, spread) of one group from its members' times: means over members (of whole times, the
    last comer's if lateness is not to count), and over the rounds that count, which are those that took the
    least."""
    of_members = statistics.fmean if lateness else min
    wholes = [of_members(each) for each in zip(*(wholes for wholes, _ in members), strict=True)]
    starts = [statistics.fmean(each) for each in zip(*(starts for _, starts in members), strict=True)]
    rounds = sorted(zip(wholes, starts, strict=True))[: max(1, round(KEPT * len(wholes)))]
    whole_us = statistics.fmean(whole for whole, _ in rounds)
    range_us = max(whole for whole, _ in rounds) - min(whole for whole, _ in rounds)
    return whole_us, statistics.fmean(start for _, start in rounds), range_us / whole_us


def pace(device: torch.device) -> tuple[float, float]:
    """(how much of what `timed` computes a rank does in a microsecond, the part of a processor that this rank
    has), while all compute at once. The first is the median of ranks; 0 on an accelerator, where no compute
    goes before a collective."""
    if device.type != "cpu":
        return 0.0, 1.0
    meet(device)
    product_us, part = pace_alone(device)
    return agree_median(1.0 / product_us), part


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
