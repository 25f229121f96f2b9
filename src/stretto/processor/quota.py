"""The quota under which running ranks compute, and how fast they are while it lasts.

1. What each rank's control group says (`stretto.processor.control_groups`); the tightest counts for all.
2. Its speed: ranks rest for a while and then compute for a part of what they may, again and again, each
   in its own time. A rank that has a core for itself then has a full processor; one whose neighbours are
   allowed the rest of its core shares it with those that happen to compute.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist

from stretto.backend.collectives import gather_all
from stretto.backend.gloo_adapter import lanes_first
from stretto.ir.costs import Processor
from stretto.processor.control_groups import own_share, processor_quota

SIDE = {"cpu": 192, "cuda": 4096}
"""Rows and columns of the products: short on a processor, so that the end of a collective is seen soon;
large enough to fill an accelerator."""

WEIGHTS_BYTES = 16 * 2**20
"""The products on a processor read as many bytes in turn, as a step reads weights: what a transport copies
takes caches and memory from them, and what they read takes caches from the transport; products of one small
matrix would notice neither. Assumed."""


def products_on(device: torch.device) -> Callable[[], None]:
    """A function that computes one product; call it under `no_grad`."""
    side = SIDE.get(device.type, SIDE["cuda"])
    count = WEIGHTS_BYTES // (4 * side * side) if device.type == "cpu" else 1
    factors = cycle([torch.full((side, side), 0.01, device=device) for _ in range(count)])
    product = torch.empty((side, side), device=device)

    def compute() -> None:
        factor = next(factors)
        torch.mm(factor, factor, out=product)

    return compute


BURSTS = 40
"""Rests and bursts that are measured. Assumed: they take half a second with a period of 10 ms."""

REST = (0.2, 0.8)
"""Of a period, the least and the most that a rank rests. Assumed: as long as a step's waits."""

BURST = 0.6
"""Of what a rank may compute in a period, so that no burst meets the end of it. Assumed."""


def quota_share() -> float:
    """The share of a processor that a quota leaves to each thread that this process computes with; 1 without
    one."""
    return own_share(torch.get_num_threads())


def agreed_quota(device: torch.device) -> Processor | None:
    """The quota under which all ranks compute, equal on all of them; every running rank calls it. None when
    one of them has none that limits the threads that it computes with."""
    result = processor_quota() if device.type == "cpu" else None
    share = quota_share()
    mine = (result[0], share) if result is not None and share < 1.0 else None
    limits = [one for one in gather_all(mine) if one is not None]
    if len(limits) < dist.get_world_size():
        return None
    period_us, share = min(limits, key=lambda quota: quota[1])
    speeds = gather_all(burst_speed(period_us, share, dist.get_rank()))
    return Processor(period_us, share, min(1.0, max(share, statistics.fmean(speeds))))


def burst_speed(period_us: float, share: float, rank: int) -> float:
    """Step 2 on one rank: its part of a processor in bursts; `rank` draws its rests."""
    compute = products_on(torch.device("cpu"))
    draw = random.Random(rank)
    burst_ns = BURST * share * period_us * 1e3
    wall_ns = mine_ns = 0
    with torch.no_grad(), lanes_first():
        compute()
        for _ in range(BURSTS):
            time.sleep(draw.uniform(*REST) * period_us / 1e6)
            begin, mine = time.perf_counter_ns(), time.thread_time_ns()
            while time.thread_time_ns() - mine < burst_ns:
                compute()
            wall_ns += time.perf_counter_ns() - begin
            mine_ns += time.thread_time_ns() - mine
    return min(1.0, mine_ns / wall_ns)
