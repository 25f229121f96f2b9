"""Races one after the other, each in a lab of its own; the balanced rate; one result for all.

Needs root, as every lab does. Touches the lab and the worker's files.

    1. A race has a lab of one rank a host (`in_lab`).
    2. The balanced rate is found before the race, in a lab without limit: ops and collectives are timed, and
       the rate is the one at which the bytes that a microbatch moves, in collectives and in messages to other
       places, which leave by the same card, take as long as its compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.in_lab import CORES, lab_of, result_of
from benchmarks.work import PlaceWork

BALANCED = "balanced"
UNLIMITED = "unlimited"

PROBE = "probe"
"""The word that asks a worker for the work of each place alone (`work.PlaceWork`)."""


class Race(Protocol):
    """What a race is asked: a frozen dataclass of plain data, which in words is the race's name."""

    @property
    def rate(self) -> str:
        """As the lab takes it, or `BALANCED`."""
        ...

    @property
    def world(self) -> int: ...


AnyRace = TypeVar("AnyRace", bound=Race)


def run_races(
    module: str,
    setups: Sequence[AnyRace],
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None],
    folder: Path | None = None,
) -> None:
    """Run all races. module: of this room, whose `run_worker(setup, word)` every rank runs. keep: is given
    {"cores": ..., "races": [{"setup", "rows"}, ...]} after each, with those before it, so that an end before
    the last loses none. folder: where what ran is kept (`kept`), a folder for each race and system.
    Raises RunError when ranks fail."""
    found: list[Any] = []
    for number, setup in enumerate(setups, 1):
        say(f"race {number} of {len(setups)}: {setup}")
        asked = setup.rate
        if asked == BALANCED:
            setup = _at(setup, balanced_rate(in_lab(module, _at(setup, UNLIMITED), PROBE)))
            say(f"the balanced rate is {setup.rate}")
        kept = "" if folder is None else str((folder / _folder_name(setup)).resolve())
        result = in_lab(module, setup, kept)
        result["setup"]["asked_rate"] = asked
        found.append(result)
        keep({"cores": CORES, "races": found})


def _at(setup: AnyRace, rate: str) -> AnyRace:
    made: AnyRace = replace(setup, rate=rate)  # type: ignore[type-var]
    return made


def _folder_name(setup: Race) -> str:
    return str(setup).replace(",", "").replace(" ", "-")


def balanced_rate(places: Sequence[dict[str, float]]) -> str:
    """Step 2: the rate, as the lab takes it, for the work of each place, of which the one with most compute
    counts. Where collectives take longer than compute without any limit, there is none: "unlimited"."""
    work = max((PlaceWork(**place) for place in places), key=lambda work: work.compute_us)
    if work.collective_us >= work.compute_us:
        return UNLIMITED
    mbit_per_s = 8.0 * (work.wire_bytes + work.message_bytes) / work.compute_us
    return f"{float(f'{mbit_per_s:.2g}'):g}mbit"  # more digits would be noise


def in_lab(module: str, setup: Race, kept: str) -> Any:
    """Step 1: what rank 0 found."""
    lab = lab_of(setup.world, setup.rate)
    return result_of(lab, module, asdict(setup), kept, what=str(setup))  # type: ignore[call-overload]
