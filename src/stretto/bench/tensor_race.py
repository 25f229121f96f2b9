"""The races of `stretto bench tensor`: labs one after the other, the balanced rate, one result for all.

Needs root, as every lab does. Touches the lab and the worker's files.

    1. A race has a lab of one rank a host (`bench.in_lab`).
    2. The balanced rate is found before the race, in a lab without limit: ops and collectives are timed, and
       the rate is the one at which the bytes that a microbatch moves, in collectives and in messages to other
       places, which leave by the same card, take as long as its compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from stretto.bench.in_lab import CORES, lab_of, result_of
from stretto.bench.tensor import PROBE
from stretto.bench.tensor_result import Setup
from stretto.bench.work import PlaceWork

BALANCED = "balanced"
UNLIMITED = "unlimited"

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


def run_races(
    setups: Sequence[Setup],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    folder: Path | None = None,
) -> None:
    """Run all races. keep: is given {"cores": ..., "races": [{"setup", "rows"}, ...]} after each, with those
    before it, so that an end before the last loses none. folder: where what ran is kept (`bench.kept`), a
    folder for each race and mode. Raises RunError when ranks fail."""
    found: list[Any] = []
    for number, setup in enumerate(setups, 1):
        say(f"race {number} of {len(setups)}: {setup}")
        asked = setup.rate
        if asked == BALANCED:
            setup = replace(setup, rate=balanced_rate(_in_lab(replace(setup, rate=UNLIMITED), PROBE)))
            say(f"the balanced rate is {setup.rate}")
        kept = "" if folder is None else str((folder / _folder_name(setup)).resolve())
        result = _in_lab(setup, kept)
        result["setup"]["asked_rate"] = asked
        found.append(result)
        keep({"cores": CORES, "races": found})


def _folder_name(setup: Setup) -> str:
    return str(setup).replace(",", "").replace(" ", "-")


def balanced_rate(places: Sequence[dict[str, float]]) -> str:
    """Step 2: the rate, as the lab takes it, for the work of each place, of which the one with most compute
    counts. Where collectives take longer than compute without any limit, there is none: "unlimited"."""
    work = max((PlaceWork(**place) for place in places), key=lambda work: work.compute_us)
    if work.collective_us >= work.compute_us:
        return UNLIMITED
    mbit_per_s = 8.0 * (work.wire_bytes + work.message_bytes) / work.compute_us
    return f"{float(f'{mbit_per_s:.2g}'):g}mbit"  # more digits would be noise


def _in_lab(setup: Setup, kept: str) -> Any:
    """Step 1: what rank 0 found."""
    lab = lab_of(setup.world, setup.rate)
    return result_of(lab, "tensor", asdict(setup), kept, what=str(setup))
