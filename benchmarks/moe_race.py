"""The races of `python -m benchmarks moe`: over how many hosts, and who chooses experts.

Touches nothing that runs; `benchmarks.races` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.moe_model import Routing
from benchmarks.moe_result import Setup

WORKER = "moe"
"""The module of this room that every rank runs."""

VERSION = 2
"""Of the JSON: it goes up when a key changes its meaning or is gone."""

SHAPES = {2: Setup(ep=2), 4: Setup(ep=4, sequence=512)}
"""Hosts, a rank on each -> the race. Four have half a core each, so their sequences are half as long: a race
of either takes as long."""


def races(
    rates: Sequence[str], hosts: Sequence[int], routings: Sequence[Routing], *, rounds: int
) -> list[Setup]:
    """The races of all combinations, hosts outermost."""
    return [
        replace(SHAPES[ranks], rate=rate, routing=routing, rounds=rounds)
        for ranks in hosts
        for routing in routings
        for rate in rates
    ]
