"""What a reshard is made of: transfers between ranks, and copies that a rank makes for itself."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.tensor.layout import Region


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box goes from a rank that holds it along a chain of ranks that need it.

    tensor: which of the tensors that are planned together, from 0.
    region: the box, in elements of the whole tensor.
    nbytes: its bytes.
    sender: the rank that it comes from.
    receivers: the sender sends to the first, the first hands each piece on to the second, and so on; each
        keeps it. One receiver: a plain message.
    start_us, end_us: predicted: the first byte leaves the sender, the last one reaches the last receiver.
    """

    tensor: int
    region: Region
    nbytes: int
    sender: int
    receivers: tuple[int, ...]
    start_us: float = 0.0
    end_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Copy:
    """A rank holds a box that it needs, and copies it from its source tensor into its target tensor."""

    tensor: int
    region: Region
    nbytes: int
    rank: int
