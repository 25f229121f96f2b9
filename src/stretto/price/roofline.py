"""What all prices share: collectives as rings over links, ops that are free, a window's own time.

    collective  a ring of n over such links: n - 1 empty messages in turn to gather or to scatter, each moving
                (n - 1) / n of the tensor; twice that to reduce (Patarasuk and Yuan 2009); an exchange sends
                one part to each in turn

Touches no device.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.ir.collectives import KINDS
from stretto.ir.costs import CollectiveCost, Link
from stretto.ir.curve import Curve
from stretto.ir.program import GETITEM, WAIT
from stretto.ir.transfers import message_us

ACTION_US = 8.0
"""Time of a window's run beside its ops: its call, its clock readings. Measured on a 2.6 GHz core."""

FREE = (GETITEM, WAIT)
"""Ops that take no time of their own: the tuple has paid, the communication has a lane of its own."""


def ring_cost(link: Link, kind: str, members: int) -> CollectiveCost:
    """A collective as a ring of `members` over equal links."""
    part = KINDS[kind].moved(members)
    # A transport that needs more processor time than wire time moves no faster than the processor does.
    us_per_byte = part * max(1.0 / link.bytes_per_us, link.processor_us_per_mb / 1e6)
    latency_us = KINDS[kind].steps(members) * message_us(link, 0)
    span = 1_000_000.0
    return CollectiveCost(
        Curve(((0.0, latency_us), (span, latency_us + span * us_per_byte))),
        link.processor_us_per_mb * part,
        0.0,
        f"a ring of {members} over links: {link.source}",
    )


def scaled(cost: CollectiveCost, members: int, wish: int) -> CollectiveCost:
    """The cost of a ring of `wish` members from that of one of `members`.

    Latency goes with the steps, n - 1, and bytes with (n - 1) / n (Patarasuk and Yuan 2009).
    """
    if members == wish:
        return cost
    steps = (wish - 1) / (members - 1)
    part = steps * members / wish
    latency = cost.curve.points[0][1]
    points = [(nbytes, latency * steps + (us - latency) * part) for nbytes, us in cost.curve.points]
    return replace(
        cost,
        curve=Curve(tuple(points)),
        processor_us_per_mb=cost.processor_us_per_mb * part,
        processor_us=cost.processor_us * steps,
        source=f"{cost.source}; scaled to {wish} ranks as a ring",
    )
