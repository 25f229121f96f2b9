"""The part of a processor that a thread has while it computes beside others of the same core.

Hosts that share a core take turns at it, milliseconds each. An op of half a millisecond takes that long, or
as long as the turn of another on top: by the clock one measures the turns. The time of the thread, over the
part of the core that it has, is what the op takes on average, and says it after a few rounds.

Not for a quota, which stops all ranks of a host wherever they are: there the clock is right, and what a share
is, the control group says (`stretto.backend.control_groups`). Touches nothing but clocks.
"""

from __future__ import annotations

import time

import torch

from stretto.backend.control_groups import own_share
from stretto.processor.products import products_on, us_each

FREE = 0.9
"""From this part on a thread had its core for itself: the kernel and its own process took the rest. Assumed;
one of two threads that share a core has half."""

ALONE_US = 100_000.0
"""Length of the compute that tells how fast a rank is. Assumed: a dozen turns of two hosts."""


def part_of(thread_us: float, clock_us: float) -> float:
    """The part of a processor that a thread had which computed for so long; 1 from `FREE` on."""
    part = thread_us / clock_us if clock_us else 1.0
    return 1.0 if part >= FREE else part


def has_quota() -> bool:
    """Whether a quota holds back the threads that this process computes with."""
    return own_share(torch.get_num_threads()) < 1.0


def pace_alone(device: torch.device) -> tuple[float, float]:
    """(what a product takes in microseconds, the part of a processor that this thread has) while all ranks
    compute; to be called by all of them at once. Under a quota the part is what the quota leaves."""
    share = own_share(torch.get_num_threads())
    compute = products_on(device)
    begin_ns, mine_ns = time.perf_counter_ns(), time.thread_time_ns()
    product_us = us_each(compute, ALONE_US)
    mine_us, took_us = (time.thread_time_ns() - mine_ns) / 1e3, (time.perf_counter_ns() - begin_ns) / 1e3
    return product_us, share if share < 1.0 else part_of(mine_us, took_us)
