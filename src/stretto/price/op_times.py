"""Op times that were measured, and the machine that they belong to, as a calibration file holds them.

A key is an op's signature (`stretto.ir.prices`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from stretto.files.codec import Amount, Codec, Fits, rounded

CODEC = Codec({float: rounded(4)})
"""Of what is measured: more digits are noise."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured op. spread: range of the faster half of the rounds over their mean; flops, nbytes: its
    arithmetic, and the bytes that it reads and writes."""

    us: Amount
    spread: Amount
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What op times belong to. kind: as `Job.device` says it."""

    device: str
    torch: str
    threads: int
    kind: Annotated[str, Fits(lambda kind: kind in ("cpu", "cuda"), "cpu or cuda")] = "cpu"

    def __str__(self) -> str:
        return f"{self.device}, PyTorch {self.torch}, {self.threads} thread{'s' if self.threads != 1 else ''}"
