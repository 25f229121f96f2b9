"""A fair race: systems take turns in the same processes, every turn is timed from a barrier to the last rank.

1. Every system takes some turns that do not count.
2. In each round every system takes one turn; the order rotates, so that none always follows the same.
3. A turn's time is the longest of all ranks. Medians over rounds are quoted, all times are kept.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

WARM_UPS = 2
"""Turns before the rounds: first messages open connections, first steps fill caches."""


@dataclass(frozen=True, slots=True)
class Times:
    """A system's step times in seconds, one a round, the longest of all ranks."""

    rounds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds)


def race(
    systems: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    after: Callable[[str], None] | None = None,
    before: Callable[[], object] | None = None,
    say: Callable[[str], None] | None = None,
    warm_ups: int = WARM_UPS,
) -> dict[str, Times]:
    """Time one step of each system, `rounds` times in turn. Every rank calls it with equal names in order.

    before, after(name): called before and after each counted turn, outside the clock. say: told of progress.
    warm_ups: turns of each system that do not count.
    """
    names = list(systems)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warm_ups):
            _turn(systems[name])
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            if before is not None:
                before()
            found[name].append(_turn(systems[name]))
            if after is not None:
                after(name)
        if say is not None:
            say(f"round {number + 1} of {rounds}")
    return {name: Times(tuple(times)) for name, times in found.items()}


def _turn(step: Callable[[], object]) -> float:
    gc.collect()  # so that no turn pays for the one before
    dist.barrier()
    start = time.perf_counter()
    step()
    longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
