"""Op times that were measured, and the machine that they belong to, as a calibration file holds them.

A key is an op's signature (`stretto.ir.prices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import StrettoError
from stretto.files.whole_file import write_file
from stretto.ir.reading import Cursor

KINDS = ("cpu", "cuda")
"""Of devices that ops are captured for."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured op. spread: range of the faster half of the rounds over their mean; flops, nbytes: its
    arithmetic, and the bytes that it reads and writes."""

    us: float
    spread: float
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What op times belong to. kind: as `Job.device` says it."""

    device: str
    torch: str
    threads: int
    kind: str = "cpu"

    def __str__(self) -> str:
        return f"{self.device}, PyTorch {self.torch}, {self.threads} thread{'s' if self.threads != 1 else ''}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one. Raises StrettoError."""
    try:
        write_file(path, text)
    except OSError as error:
        raise StrettoError(f"cannot write {path}: {error.strerror}") from None


def encode_machine(machine: Machine) -> dict[str, str | int]:
    return {
        "kind": machine.kind,
        "device": machine.device,
        "torch": machine.torch,
        "threads": machine.threads,
    }


def decode_machine(cursor: Cursor) -> Machine:
    parts = cursor.fields(("kind", "device", "torch", "threads"))
    kind = parts["kind"].text()
    if kind not in KINDS:
        raise parts["kind"].error(f"expected {' or '.join(KINDS)}, found {kind!r}")
    return Machine(parts["device"].text(), parts["torch"].text(), parts["threads"].integer(), kind)


def encode_ops(ops: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {
        key: {
            "us": round(ops[key].us, 3),
            "spread": round(ops[key].spread, 3),
            "flops": ops[key].flops,
            "bytes": ops[key].nbytes,
        }
        for key in sorted(ops)
    }


def decode_ops(cursor: Cursor) -> dict[str, Timing]:
    found: dict[str, Timing] = {}
    for key, entry in cursor.members().items():
        parts = entry.fields(("us", "spread", "flops", "bytes"))
        us, spread = (parts[name].amount() for name in ("us", "spread"))
        found[key] = Timing(us, spread, parts["flops"].integer(), parts["bytes"].integer())
    return found
