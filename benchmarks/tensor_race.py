"""The races of `python -m benchmarks tensor`: which GPTs, over which layouts.

Touches nothing that runs; `benchmarks.races` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.tensor_result import Setup

WORKER = "tensor"
"""The module of this room that every rank runs."""

SHAPES = {
    1024: Setup(hidden=1024, heads=16, layers=3, microbatch=2),
    2048: Setup(hidden=2048, heads=32, layers=2, microbatch=1),
}
"""Hidden size -> the GPT of that size. With Gloo a megabyte all-reduced takes about 8 ms of the processor, so
smaller models would measure the processor and not the overlap."""


def races(
    rates: Sequence[str], hidden: Sequence[int], pps: Sequence[int], *, sequence_parallel: bool, rounds: int
) -> list[Setup]:
    """The races of all combinations, layouts outermost."""
    return [
        replace(SHAPES[size], rate=rate, pp=pp, sequence_parallel=sequence_parallel, rounds=rounds)
        for pp in pps
        for size in hidden
        for rate in rates
    ]
