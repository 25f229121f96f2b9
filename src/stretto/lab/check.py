"""Finds out what this machine can emulate, by trying it: `stretto lab check`.

Makes small labs and removes them. Each finding says what is missing and what to install.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stretto.errors import StrettoError
from stretto.lab import leftovers, tools
from stretto.lab.cluster import Lab

TRIED: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    # what: (settings of a lab that needs it, whether no lab can run without it)
    "network namespaces": ({}, True),
    "link rate (tbf)": ({"rate": "100mbit"}, True),
    "delay (netem)": ({"delay_ms": 1.0}, False),
    "processor quota": ({"cpus": 0.5}, False),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried. says: what was found; where it is missing, what to do. required: whether the
    lab cannot run without it."""

    what: str
    ok: bool
    says: str
    required: bool = True


def examine() -> Iterator[Finding]:
    """Try one thing after the other; stops at what nothing else can do without."""
    lacking = tools.missing()
    yield Finding("root, ip, tc", not lacking, "; ".join(lacking) or str(tools.find_tool("ip")))
    if lacking:
        return
    if swept := leftovers.sweep():
        yield Finding("leftovers", True, f"removed what killed labs left: {', '.join(swept)}")
    for what, (settings, required) in TRIED.items():
        try:
            with Lab(hosts=2, **settings):
                yield Finding(what, True, "works", required)
        except StrettoError as error:
            yield Finding(what, False, str(error), required)
