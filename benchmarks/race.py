"""A fair race: systems take turns in the same processes, every turn is timed from a barrier to the last rank.

1. Every system takes some turns that do not count.
2. In each round every system takes one turn; the order rotates, so that none always follows the same.
3. A turn's time is the longest of all ranks. Medians over rounds are quoted, all times are kept.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.errors import RunError

WARM_UPS = 2
"""Turns before the rounds: first messages open connections, first steps fill caches."""

SAME = 1e-5
"""Relative error up to which float32 losses and gradients of different orders of sums are the same. Measured:
2e-6 at most."""


Step = Callable[[], Tensor | None]
"""One step of a system; its loss, on ranks that have it."""


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
    after: Callable[[str], None] = lambda name: None,
    say: Callable[[str], None] = lambda text: None,
    warm_ups: int = WARM_UPS,
) -> dict[str, Times]:
    """Time one step of each system, `rounds` times in turn. Every rank calls it with equal names in order.

    after(name): called after each counted turn, outside the clock. say: is given the progress. warm_ups:
    turns of each system that do not count.
    """
    names = list(systems)
    found: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        for _ in range(warm_ups):
            timed(systems[name])
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(timed(systems[name]))
            after(name)
        say(f"round {number + 1} of {rounds}")
    return {name: Times(tuple(times)) for name, times in found.items()}


def timed(step: Callable[[], object]) -> float:
    """Seconds of one turn, of the rank that takes longest."""
    gc.collect()  # so that no turn pays for the one before
    if not dist.is_initialized():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    step()
    longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """As `zero_grad` does."""
    for parameter in parameters:
        parameter.grad = None


def fresh(
    parameters: Iterable[nn.Parameter], step: Callable[[], Tensor | None]
) -> Callable[[], Tensor | None]:
    """A step that begins without gradients."""
    kept = list(parameters)

    def run() -> Tensor | None:
        drop_gradients(kept)
        return step()

    return run


def compare(
    name: str, found: Mapping[str, Tensor], known: Mapping[str, Tensor], whose: str, same: float = SAME
) -> float:
    """The largest relative error of a system's loss and gradients against those of another, by name.

    Raises RunError where one is missing, or differs by more than `same`: the race is void.
    """
    if found.keys() != known.keys():
        raise RunError(f"{name} has other gradients than {whose}: {sorted(found.keys() ^ known.keys())}")
    worst = 0.0
    for key, value in known.items():
        error = float((found[key] - value).norm() / value.norm().clamp_min(1e-30))
        worst = max(worst, error)
        if error > same:
            raise RunError(f"{name} differs from {whose} in {key} by {error:.1e}")
    return worst


@contextmanager
def running(world: int, threads: int = 1) -> Iterator[bool]:
    """Around what a worker does: its process group, where there are several ranks. Gives whether this is the
    first rank."""
    torch.set_num_threads(threads)
    if world > 1:
        dist.init_process_group("gloo")
    yield is_first()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the first rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say_on_first(text: str) -> None:
    """Print progress to standard error, on the first rank alone."""
    if is_first():
        print(text, file=sys.stderr, flush=True)
